"""`hardware()` → `Hardware`: this machine or a named one. No torch, no CUDA context."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.core.display import Result, Table
from toolkit.core.errors import MissingLibrary, ToolkitError, value_or
from toolkit.core.units import GiB, format_bytes, parse_bytes
from toolkit.devices.gpu_catalog import CARDS, GPUSpec, card_key, card_of, mig_card


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or one machine's processor shared by its ranks."""

    kind: str
    """`cpu` or `cuda`."""
    name: str
    total_bytes: int
    free_bytes: int
    dtypes: tuple[str, ...]
    """Precisions that it computes natively: of `fp32`, `bf16`, `fp16`."""
    attentions: tuple[str, ...]
    """Attention kernels that are installed and run on it, best first; after them those that are only taken by name."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None on a CPU and on AMD's GPUs."""
    card: GPUSpec | None = None
    """The catalog's speeds; None for an unknown device."""

    @property
    def key(self) -> str | None:
        """The name of its row in the catalog; None for speeds of no row."""
        return next((key for key, card in CARDS.items() if card == self.card), None)


@dataclass(frozen=True, kw_only=True)
class Hardware(Result):
    """Equal devices on equal nodes."""

    device: Device
    count: int
    """Devices of a node; on `cpu` the requested number of ranks."""
    nodes: int = 1
    host_bytes: int
    """Memory of a node's host, total."""
    host_free_bytes: int
    notes: tuple[str, ...] = ()
    """Assumptions, and devices that are not used, each as one sentence."""

    @property
    def ranks(self) -> int:
        """One rank a device."""
        return self.count * self.nodes

    @property
    def label(self) -> str:
        """The machine's name as `hardware` takes it: `8x H100-80GB`."""
        nodes = f"{self.nodes} nodes x " if self.nodes > 1 else ""
        word = "cpu" if self.device.kind == "cpu" else self.device.key or self.device.name
        return f"{nodes}{self.count}x {word}"

    def tables(self) -> list[Table]:
        """Return the figures of the device and its host."""
        device = self.device
        layout = f"{self.count} a node, {self.nodes} nodes" if self.nodes > 1 else f"{self.count}"
        capability = [("compute capability", "{}.{}".format(*device.capability))] if device.capability else []
        rows = [
            ("device", f"{device.name} ({device.kind})"),
            ("ranks" if device.kind == "cpu" else "devices", layout),
            ("device memory", f"{format_bytes(device.total_bytes)}, {format_bytes(device.free_bytes)} free"),
            *capability,
            ("native precisions", ", ".join(device.dtypes)),
            ("attention kernels", ", ".join(device.attentions)),
            ("host memory", f"{format_bytes(self.host_bytes)}, {format_bytes(self.host_free_bytes)} free"),
        ]
        return [Table(title="Hardware", columns=("figure", "value"), rows=rows, notes=self.notes)]


def hardware(name: str | None = None, host_memory: str | None = None) -> Hardware:
    """Return this machine, or a named one.

    Args:
        name: `"cpu"`, `"2x cpu"` (ranks that share this host), `"T4"`, `"8x H100-80GB"`, `"2 nodes x 8x A100-80GB"`.
            Left out: this machine's visible GPUs, or its processor where there are none, or where torch is a CPU build.
        host_memory: memory of a node's host, as `"60GiB"`. Left out: this machine's; of a named one the catalog's.

    Raises:
        ToolkitError: for a name that is not in the catalog, with the nearest; for a GPU with a driver that does not answer.
        MissingLibrary: where there are GPUs, and the library that counts them is not installed.
    """
    machine = _this_machine() if name is None else _parse_name(name)
    if host_memory is None:
        return machine
    size = parse_bytes(host_memory)
    if not size:
        raise ToolkitError(f"host_memory {host_memory!r}: expected a size such as 60GiB.")
    device = machine.device
    if device.kind == "cpu":
        device = dataclasses.replace(device, total_bytes=size, free_bytes=size)
    notes = machine.notes if name is None else ()  # of a named one it is the note that assumes another size
    return dataclasses.replace(machine, device=device, host_bytes=size, host_free_bytes=size, notes=notes)


def torch_build() -> str | None:
    """Return the target of the installed torch: `"cpu"`, `"cuda 13.0"`, `"rocm 7.1"`; None without torch. No import."""
    module = importlib.util.find_spec("torch")
    version = Path(module.origin).with_name("version.py") if module and module.origin else None
    if version is None or not version.is_file():
        return None
    text = version.read_text(encoding="utf-8")
    for word, key in (("cuda", "cuda"), ("rocm", "hip")):
        if number := re.search(rf"^{key}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE):
            return f"{word} {number[1]}"
    return "cpu"


def host_memory() -> tuple[int, int]:
    """Return total and available bytes of this host: physical memory, or the limit of this process's control group."""
    import psutil

    memory = psutil.virtual_memory()
    limits = cgroup_memory(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return min([memory.total, *(total for total, _ in limits)]), min([memory.available, *(free for _, free in limits)])


def cgroup_memory(root: Path, own: Path) -> list[tuple[int, int]]:
    """Limit and free bytes of every control group above this process that has a limit, of version 1 or 2.

    Args:
        root: where control groups are mounted.
        own: the file that lists this process's groups. A container often sees other paths: a missing one is skipped, and
            the root, which is then its own group, is always read.
    """
    files = {
        "": ("memory.max", "memory.current", "inactive_file"),
        "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    limits = []
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in files:
            continue
        maximum, current, cache = files[controllers]
        inside = Path(path.lstrip("/"))
        for folder in (root / controllers / part for part in (inside, *inside.parents)):
            if (folder / maximum).is_file() and (limit := (folder / maximum).read_text().strip()) != "max":
                pages = re.search(rf"^{cache} (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
                # The kernel reclaims unused file pages on demand.
                used = int((folder / current).read_text()) - (int(pages[1]) if pages else 0)
                limits.append((int(limit), int(limit) - used))
    return limits


# This machine ---------------------------------------------------------------------------------------------------------


def _this_machine() -> Hardware:
    total, free = host_memory()
    build = torch_build() or "not installed"
    notes: tuple[str, ...] = ()
    try:
        gpus = _gpus()
    except ToolkitError as error:
        if build.startswith("cuda"):
            raise
        gpus, notes = [], (str(error),)
    if gpus and not build.startswith("cuda"):
        what = f"{len(gpus)} x {gpus[0].name} cannot be used: torch here is {build}."
        gpus, notes = [], (f"{what} Install one for CUDA from pytorch.org.",)
    if not gpus:
        return Hardware(device=_cpu(total, free), count=1, host_bytes=total, host_free_bytes=free, notes=notes)
    if len({gpu.name for gpu in gpus}) > 1:
        names = ", ".join(gpu.name for gpu in gpus)
        notes = (f"The GPUs differ ({names}): each counts as the one with the least free memory.",)
    least = min(gpus, key=lambda gpu: gpu.free_bytes)
    return Hardware(device=least, count=len(gpus), host_bytes=total, host_free_bytes=free, notes=notes)


def _cpu(total: int, free: int) -> Device:
    """Return this CPU. bf16 runs on every CPU, fp16 (under DeepSpeed) with oneDNN; FlexAttention has no backward."""
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    # torch's `mkldnn._is_mkldnn_fp16_supported`, which DeepSpeed calls, is true with either.
    half = ("fp16",) if re.search(r"\b(avx512_fp16|avx_ne_convert)\b", text) else ()
    name = model[1] if model else platform.processor() or platform.machine()
    return Device(
        kind="cpu", name=name, total_bytes=total, free_bytes=free, dtypes=("fp32", *half), attentions=("sdpa", "eager")
    )


def _gpus() -> list[Device]:
    """Return the GPUs that CUDA would show this process, read by NVML without a CUDA context.

    Raises:
        ToolkitError: where there is a GPU and the driver does not answer.
    """
    selection = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = any(Path("/dev").glob("nvidia[0-9]*"))  # a container may have any of them
    if selection == "":
        return []
    try:
        import pynvml
    except ImportError:
        if present:
            raise MissingLibrary("GPUs cannot be counted without nvidia-ml-py: `pip install nvidia-ml-py`.") from None
        return []
    try:
        pynvml.nvmlInit()
        present = True
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        by_uuid = {pynvml.nvmlDeviceGetUUID(handle): handle for handle in handles}
        devices = []
        for uuid in visible(list(by_uuid), selection):
            if uuid in by_uuid:
                whole = by_uuid[uuid]
                part = first_instance(pynvml, whole)
            else:
                part = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                whole = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
            devices.append(_gpu(pynvml, part, whole))
            if part is not whole:  # a process sees one MIG instance at most (MIG User Guide, "Device Enumeration")
                break
        return devices
    except pynvml.NVMLError as error:
        if present:
            raise ToolkitError(
                f"the NVIDIA driver does not answer: {error}. `nvidia-smi` should list the GPUs; restart after an update. "
                "To train on the CPU, set CUDA_VISIBLE_DEVICES to nothing."
            ) from None
        return []


def first_instance(nvml: Any, gpu: Any) -> Any:
    """Return the NVML handle of a GPU's first MIG instance, the one that CUDA uses; the GPU's own without MIG."""
    with contextlib.suppress(nvml.NVMLError):  # an old driver knows no MIG
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):  # 0 without MIG
            with contextlib.suppress(nvml.NVMLError_NotFound):
                return nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
    return gpu


def _gpu(nvml: Any, part: Any, whole: Any) -> Device:
    """Return a GPU (`part` is `whole`), or a MIG instance of it."""
    memory, name = nvml.nvmlDeviceGetMemoryInfo(part), nvml.nvmlDeviceGetName(part)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(whole)
    total, whole_total = int(memory.total), int(nvml.nvmlDeviceGetMemoryInfo(whole).total)
    card = card_of(name, whole_total)
    if card and part is not whole:
        card = mig_card(card, nvml.nvmlDeviceGetAttributes(part).computeInstanceSliceCount, total / whole_total)
    return _cuda(name, total, int(memory.free), (major, minor), card, named=False)


def visible(uuids: Sequence[str], selection: str | None) -> list[str]:
    """Return the UUIDs of the devices in `CUDA_VISIBLE_DEVICES`, in its order.

    An entry is an index, the beginning of a `GPU-` UUID, or a whole `MIG-` UUID. As in CUDA, the first entry that names
    nothing ends the list (CUDA C++ Programming Guide, "Environment Variables").
    """
    if selection is None:
        return list(uuids)
    devices: list[str] = []
    for entry in (word.strip() for word in selection.split(",")):
        if entry.isdigit():
            matching = list(uuids[int(entry) : int(entry) + 1])
        elif entry.startswith("MIG-"):
            matching = [entry]
        else:
            matching = [uuid for uuid in uuids if entry.startswith("GPU-") and uuid.startswith(entry)]
        if len(matching) != 1:
            break
        devices += matching
    return devices


# A named one ----------------------------------------------------------------------------------------------------------


def _parse_name(name: str) -> Hardware:
    number = r"(\d+)\s*"
    parts = re.fullmatch(rf"(?:{number}nodes?\s*x\s*)?(?:{number}x\s*)?(\S.*?)", name.strip(), re.IGNORECASE)
    if parts is None:
        raise ToolkitError(f"hardware {name!r}: expected a name such as '8x H100-80GB' or '2 nodes x 8x A100-80GB'.")
    nodes, count, word = int(parts[1] or 1), int(parts[2] or 1), parts[3]
    if nodes < 1 or count < 1:
        raise ToolkitError(f"hardware {name!r}: expected at least one device on at least one node.")
    if word.lower() == "cpu":
        total, free = host_memory()
        return Hardware(device=_cpu(total, free), count=count, nodes=nodes, host_bytes=total, host_free_bytes=free)
    key = card_key(name, word)
    card = CARDS[key]
    size, host = int(card.gib * GiB), card.host_gib * count * GiB
    note = f"Host memory is not in the name: {card.host_gib} GiB for each GPU are assumed, as {card.machine} has them."
    return Hardware(
        device=_cuda(key, size, size, card.capability, card, named=True),
        count=count, nodes=nodes, host_bytes=host, host_free_bytes=host, notes=(note,),
    )  # fmt: skip


# What a device can do -------------------------------------------------------------------------------------------------


def _cuda(
    name: str, total: int, free: int, capability: tuple[int, int] | None, card: GPUSpec | None, *, named: bool
) -> Device:
    """Return a CUDA device: native bf16 from compute capability 8.0, fp16 from 7.0 (CUDA Programming Guide).

    AMD's have no such number; those of the catalog compute both.
    """
    number = capability or (8, 0)
    half = (("bf16",) if number >= (8, 0) else ()) + (("fp16",) if number >= (7, 0) else ())
    flash = {"flash_attention_3": number[0] == 9, "flash_attention_2": number >= (8, 0), "varlen": number >= (8, 0)}
    runs = [kernel for kernel, able in flash.items() if able]
    # A named machine may have other kernels. They come last, as torch's own does there: only a request by name takes them.
    here = [kernel for kernel in runs if _installed(kernel) and not (named and kernel == "varlen")]
    elsewhere = [kernel for kernel in runs if named and kernel not in here]
    return Device(
        kind="cuda", name=name, total_bytes=total, free_bytes=free, dtypes=("fp32", *half),
        attentions=(*here, "sdpa", "eager", *elsewhere, "flex"), capability=capability, card=card,
    )  # fmt: skip


def _installed(kernel: str) -> bool:
    """Return whether a kernel is installed, by transformers' own rules and without importing torch."""
    from importlib import metadata

    from packaging.version import Version

    if kernel == "varlen":
        torch = importlib.util.find_spec("torch")
        source = Path(torch.origin if torch and torch.origin else "").parent / "nn" / "attention" / "varlen.py"
        return source.is_file() and "enable_gqa" in source.read_text(encoding="utf-8")
    module, distribution, least = {
        "flash_attention_2": ("flash_attn", "flash-attn", "2.3.3"),
        "flash_attention_3": ("flash_attn_interface", "flash-attn-3", "3"),
    }[kernel]
    version = value_or("0", metadata.version, distribution)
    return importlib.util.find_spec(module) is not None and Version(version) >= Version(least)
