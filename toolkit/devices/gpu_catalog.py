"""The catalog of GPUs: memory, and speed by data sheet and by measurement."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from toolkit.core.errors import ToolkitError, nearest
from toolkit.core.units import GiB

WORKSTATION = "a workstation"


@dataclass(frozen=True)
class GPUSpec:
    """A GPU of the catalog. Speeds are a data sheet's peaks, dense; bandwidths in GB/s, one direction of a link."""

    gib: float
    """Total memory, as CUDA reports it."""
    capability: tuple[int, int] | None
    """CUDA compute capability; None of AMD's."""
    tflops_half: float
    """bf16, or fp16 without bf16, by tensor cores that accumulate in fp32."""
    tflops_fp32: float
    """fp32 without TF32, which torch leaves off."""
    memory: float
    """Bandwidth of the GPU's own memory."""
    peer: float
    """To another GPU of the node: NVLink, else PCIe."""
    host: float
    """PCIe, to the host."""
    network: float
    """To another node, each GPU's share of `machine`'s."""
    host_gib: int
    """Host memory for each GPU of `machine`."""
    machine: str
    measured_half: float | None = None
    """Speed of its fastest measured matrix product, in the unit of `tflops_half`; None without a source."""
    sustained: float = 0.8
    """The share of the fastest product's speed that a training step's products reach."""
    alone: float | None = None
    """The same on one GPU, without collectives at the same time; None: as among several."""

    @property
    def host_memory(self) -> float:
        """GB/s that an optimizer on the host reads and writes, all ranks of a node together.

        A third of the peak of two sockets, or of a workstation's four channels of DDR4 (94 GB/s).
        """
        return 30 if self.machine == WORKSTATION else 150


CARDS = {
    "T4": GPUSpec(14.56, (7, 5), 65, 8.1, 320, 16, 16, 0.6, 16, "AWS g4dn.xlarge", 41.6, 0.55),
    "V100-16GB": GPUSpec(15.77, (7, 0), 125, 15.7, 900, 150, 16, 1.2, 61, "AWS p3.2xlarge", 83),
    "V100-32GB": GPUSpec(31.73, (7, 0), 125, 15.7, 900, 150, 16, 1.5, 96, "AWS p3dn.24xlarge", 83),
    "TITAN-RTX": GPUSpec(23.62, (7, 5), 130.5, 16.3, 672, 16, 16, 1.2, 32, WORKSTATION),
    "RTX-3090": GPUSpec(23.56, (8, 6), 71, 35.6, 936, 32, 32, 1.2, 64, WORKSTATION),
    "RTX-4090": GPUSpec(23.52, (8, 9), 165.2, 82.6, 1008, 32, 32, 1.2, 64, WORKSTATION, 179.2),
    "RTX-5090": GPUSpec(31.36, (12, 0), 209.5, 104.8, 1792, 64, 64, 1.2, 64, WORKSTATION, 254),
    "L4": GPUSpec(22.03, (8, 9), 121, 30.3, 300, 32, 32, 1.2, 16, "AWS g6.xlarge", sustained=0.55),
    "A10G": GPUSpec(21.98, (8, 6), 70, 35, 600, 32, 32, 1.2, 16, "AWS g5.xlarge"),
    "L40S": GPUSpec(44.39, (8, 9), 362, 91.6, 864, 32, 32, 2.5, 32, "AWS g6e.xlarge"),
    "A100-40GB": GPUSpec(39.38, (8, 0), 312, 19.5, 1555, 300, 32, 6.25, 144, "AWS p4d.24xlarge", 271.2),
    "A100-80GB": GPUSpec(79.14, (8, 0), 312, 19.5, 2039, 300, 32, 6.25, 144, "AWS p4de.24xlarge", 271.2),
    "H100-80GB": GPUSpec(79.11, (9, 0), 989, 67, 3350, 450, 64, 50, 256, "AWS p5.48xlarge", 794.5, 0.55, 0.8),
    "H200-141GB": GPUSpec(139.72, (9, 0), 989, 67, 4800, 450, 64, 50, 256, "AWS p5en.48xlarge", 794.5, 0.55, 0.8),
    "B200-180GB": GPUSpec(178.35, (10, 0), 2250, 80, 8000, 900, 64, 50, 256, "AWS p6-b200.48xlarge", sustained=0.55),
    "MI250X-64GB": GPUSpec(63.98, None, 191.5, 23.9, 1638, 50, 36, 12.5, 64, "HPE Cray EX235a"),
    "MI300X-192GB": GPUSpec(191.98, None, 1307, 163.4, 5300, 448, 64, 50, 225, "Azure ND MI300X v5", 668.4),
}
"""Memory: the total that PyTorch's out-of-memory messages report, the lower where drivers differ; about 1% between drivers
and boards. Compute capability: developer.nvidia.com/cuda-gpus. Speeds and bandwidths: NVIDIA's data sheets of each
product (Turing: of the TITAN RTX the full TU102, without its NVLink bridge; Volta, GA102, Ada and Blackwell
architecture white papers; L4, L40S, A100, H100, H200, HGX B200) and AMD's of the Instincts; of the A10G, AWS's.
The MI250X's row is one of its two chips, which torch counts as a device each. Its links are those between chips of
different cards, as Frontier's user guide has them.
Network and host memory: of the machine named, divided by its GPUs. Fastest products: T4, Jia et al. 2019
(arXiv:1903.07486); V100, Markidis et al. 2018 (arXiv:1803.04014); RTX 4090 and 5090, github.com/xzwgit/gpu-flops-bench;
A100, H100, MI300X, github.com/stas00/ml-engineering (compute/accelerator, MAMF); the H200 computes with the H100's chip.
Hopper's sustained share among several GPUs: by the two runs of 96 H100 that github.com/foundation-model-stack/fms-fsdp
publishes; the B200's is taken as the same. Alone: by five runs on one H200 (benchmarks/results/gpu-H200-141GB.md). The
T4's, by twelve runs of fitcheck-llm 0.3.1 (pypi.org); the L4's, which has as little power, is taken as the same."""


OTHER_PLATFORMS = {
    "tpu": "Google's TPUs need PyTorch/XLA, which no engine here drives.",
    "cerebras": "Cerebras' machines compile a whole model with their own software, which no engine here drives.",
    "trainium": "AWS's Trainium needs its Neuron libraries, which no engine here drives.",
    "rocm": "ROCm is AMD's software, and no device. Name the card, such as MI250X or MI300X: it has a forecast, and no run "
    "of ours has tried it.",
}
"""What people name that is no card of the catalog, and why it is refused."""

OTHER_BOARDS = {"PCIE", "NVL", "LAPTOP", "MAX", "TI", "SUPER", "D"}
"""Words in the names of boards that compute or communicate at other speeds than the card of the rest of the name."""


def card_key(name: str, word: str) -> str:
    """Return the catalog's spelling: `"nvidia rtx 4090"` → `"RTX-4090"`, `"H100"`, `"NVIDIA H100 80GB HBM3"` → `"H100-80GB"`.

    Raises:
        ToolkitError: for a name that is not in the catalog, with the nearest, or that is several's.
    """
    extra = r"^((nvidia|geforce|tesla|amd|instinct)-)+|-(sxm\d?|hbm\d\w?)\b"
    plain = re.sub(extra, "", re.sub(r"[\s_]+", "-", word.lower()))
    keys = {key.lower(): key for key in CARDS}
    matching = [key for low, key in keys.items() if low == plain or low.startswith(f"{plain}-")]
    if len(matching) > 1:
        raise ToolkitError(f"hardware {name!r}: say which one, {' or '.join(matching)}.")
    for platform, reason in OTHER_PLATFORMS.items():
        if platform in plain:
            raise ToolkitError(f"hardware {name!r} is unknown. {reason} Known: cpu, {', '.join(CARDS)}.")
    if not matching:
        hint = nearest(plain, [re.sub(r"-\d+GB$", "", card) for card in CARDS])
        if OTHER_BOARDS & set(plain.upper().split("-")):
            hint = " The catalog has other boards of such cards."
        raise ToolkitError(f"hardware {name!r} is unknown.{hint} Known: cpu, {', '.join(CARDS)}.")
    return matching[0]


def card_of(driver: str, total_bytes: int) -> GPUSpec | None:
    """Return the card for a driver's name (`"NVIDIA A100-SXM4-80GB"`) and the nearest memory; None if unknown.

    On a PCIe board of Volta or Ampere the same chip has no NVLink. Hopper's PCIe boards, laptops and cards named Ti, Super or D
    have other chips, in no row.
    """
    tokens = set(re.split(r"[\s_-]+", driver.upper()))
    if tokens & (OTHER_BOARDS - {"PCIE"}) or tokens >= {"H100", "PCIE"}:
        return None
    matches = [
        card
        for key, card in CARDS.items()
        if all(part in tokens for part in re.sub(r"-\d+GB$", "", key).upper().split("-"))
    ]
    card = min(matches, key=lambda card: abs(card.gib * GiB - total_bytes), default=None)
    return replace(card, peer=card.host) if card and "PCIE" in tokens else card


def mig_card(card: GPUSpec, slices: int, memory_share: float) -> GPUSpec:
    """Return the speeds of a MIG instance: `slices` sevenths of the GPU's products, its share of memory, no NVLink.

    Source: NVIDIA MIG User Guide, "Supported MIG Profiles".
    """
    products = {name: getattr(card, name) for name in ("tflops_half", "tflops_fp32", "measured_half")}
    return replace(
        card,
        gib=card.gib * memory_share,
        memory=card.memory * memory_share,
        peer=card.host,
        **{name: speed and speed * slices / 7 for name, speed in products.items()},
    )
