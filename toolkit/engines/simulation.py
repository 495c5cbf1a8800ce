"""Parts of a simulated step that engines share: reading, the walk over a micro-batch, the optimizer's step, host transfers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from toolkit.core.units import BYTES_OF, KiB, MiB, ceil_div
from toolkit.engines.job import Job
from toolkit.engines.ledger import Ledger
from toolkit.engines.records import StateMemory, Transfer
from toolkit.engines.states import (
    SNAPSHOT_CHUNK,
    State,
    packed_names,
    parameters_of,
    trained_elements,
)
from toolkit.engines.traces import Segment, Trace

QUANT_BLOCK, NESTED_BLOCK = 64, 256
"""Weights that share a 4-bit constant, and constants that share a nested one (bitsandbytes/functional.py `quantize_4bit`)."""

PACKED_AT_ONCE = 2**18
"""Weights that a rank packs at once."""
PACKING = 16 * PACKED_AT_ONCE
"""Bytes that a piece takes at most meanwhile (bitsandbytes/backends/default/ops.py)."""


class Moves(Protocol):
    """An engine's reaction to the begin and end of modules, and to complete gradients."""

    grows: bool
    """Whether the first micro-batch leaves memory allocated. The second may add to it, later ones add none."""

    def event(self, what: str, size: int, name: str, backward: bool) -> None:
        """Handle an event of `traces.Event`."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A rank's load, preparation and one step, entered into a ledger."""

    job: Job
    trace: Trace
    step: Sequence[Segment]
    """The trace over the whole depth."""
    steps: Sequence[Sequence[Segment]] = ()
    """Those of all traces, where several stages have one each."""
    ledger: Ledger
    rank: int
    num_checkpoints: int
    """Number of checkpoints that the run writes."""
    snapshot: int
    """Bytes of the rank's share of one."""

    @property
    def kept_snapshot(self) -> int:
        """Bytes of the checkpoint before the simulated step, which CPU ranks keep for the next one."""
        return self.snapshot if self.num_checkpoints > 1 and self.ledger.shared else 0

    @cached_property
    def state(self) -> StateMemory:
        """The bytes of states that the rank holds."""
        return self.job.engine.expected_state(self.job, self.rank)

    def hold(self, part: str, size: int) -> None:
        """Hold bytes of parameters, masters, gradients or moments, on the host where they are offloaded."""
        offload = self.job.strategy.offload
        on_host = offload == "cpu" if part == "parameters" else offload != "none"
        (self.ledger.offload if on_host else self.ledger.hold)(part, size)

    def hold_loaded(self, size: int) -> None:
        """Hold the loaded parameters on the device from `prepare` on. A GPU's are read into host memory unless packed."""
        ledger, job = self.ledger, self.job
        ledger.enter("load")
        if job.engine.streams(job):
            self.stream_weights(lambda state: state.bytes, shared=False)
            ledger.hold("parameters", size - ledger.held["parameters"])
            ledger.enter("prepare")
        elif job.device.kind == "cpu" or job.strategy.quantized:
            ledger.hold("parameters", size)
            ledger.touch("workspace", expert_copies(job))
            ledger.hold("buffers", quantization_constants(job))
            ledger.enter("prepare")
        else:
            ledger.offload("parameters", size)
            ledger.touch_host("workspace", expert_copies(job))
            ledger.enter("prepare")
            ledger.hold("parameters", size)
            ledger.offload("parameters", -size)

    def stream_weights(self, part: Callable[[State], int], *, shared: bool = True, ranks: int = 1) -> None:
        """Enter the weights that come from the files one at a time. A 4-bit weight is packed whole on every rank.

        Args:
            part: returns the bytes of the rank's part, which stays.
            shared: a rank holds the whole weight and its part at the same time.
            ranks: that share a weight that is not packed: each reads its own part alone.
        """
        job, ledger = self.job, self.ledger
        assert job.spec is not None
        packed, stored = packed_names(job.spec, job.strategy.adapter), job.spec.config.get("dtype") or "float32"
        sources = {parameter.name: parameter for parameter in job.spec.parameters}
        for state in parameters_of(job):
            if state.trainable and job.strategy.adapter != "none":
                continue
            source, own, whole = sources[state.name.replace(".base_layer.", ".")], part(state), state.bytes
            if source.name in packed:
                ledger.hold("buffers", packing_constants(source.elements))
                whole += PACKING
            else:
                # A cast takes its result, and experts are joined in the files' dtype; other weights lie in the mapped file.
                joined = source.elements * BYTES_OF.get(stored, 4) if job.spec.copied and source.role == "expert" else 0
                ledger.touch_host("workspace", (joined + (whole if stored != state.dtype else 0)) // ranks)
                whole = whole if ranks == 1 else 0
            ledger.touch("workspace", whole + (own if shared else 0))
            self.hold("parameters", own)

    def hold_moments(self) -> None:
        """Hold the moments: before the first step if checkpoints need their layout, else from the first step on.

        The buffers of a checkpoint's snapshot come with them, but for offloaded states: those are written from their own memory.
        """
        if not self.num_checkpoints:
            self.ledger.enter("step")
        self.hold("optimizer", self.state.optimizer or 0)
        if self.num_checkpoints and not self.ledger.shared and self.job.strategy.offload == "none":
            # Pinned in chunks; the last is rounded up to a power of two (aten/src/ATen/core/CachingHostAllocator.h).
            chunks, rest = divmod(self.snapshot, SNAPSHOT_CHUNK)
            self.ledger.offload("workspace", chunks * SNAPSHOT_CHUNK + (1 << (rest - 1).bit_length() if rest else 0))

    def train(self, moves: Moves) -> None:
        """Enter the moments and one step of an engine with torch's optimizer. The gradients end with it."""
        self.hold_moments()
        self.walk(moves)
        engine = self.job.engine
        trained = (state for state in parameters_of(self.job) if state.trainable)
        self.optimizer_step(engine.rank_elements(self.job, state) for state in trained)
        self.ledger.hold("gradients", -self.ledger.held["gradients"])

    def walk(self, moves: Moves) -> None:
        """Walk through the different micro-batches of a step, forward and backward, until the optimizer's step."""
        for number in range(min(self.job.train_config.accumulation, 2 if moves.grows else 1)):
            self.ledger.enter("forward")
            if number == 0:
                self.ledger.hold("workspace", blas_workspaces(self.job) + self.kept_snapshot)
            backward = False
            for rise, net, logits_rise, logits_net, what, size, name, *_ in self.step:
                self.ledger.walk(rise, net, logits_rise, logits_net)
                if what == "backward":
                    backward = True
                    self.ledger.enter("backward")
                if what:
                    moves.event(what, size, name, backward)
        self.ledger.enter("step")

    def optimizer_step(self, sizes: Iterable[int]) -> None:
        """Enter the temporaries of a step by torch's optimizer over tensors of these elements, in the dtype that is trained.

        Fused kernels need none. Under torch's GradScaler, which no CPU has, the recipe's optimizer is not fused.
        """
        job = self.job
        if job.precision.scaled and job.strategy.offload == "none":
            work = job.optimizer.unfused_temporaries * sum(sizes) * BYTES_OF[job.weight_dtype]
            self.ledger.touch("workspace", work)


class Buffers:
    """What an engine itself allocates in a step: gathered parameters, and gradients on their way, each under a key of its own."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.ledger, self.job = simulation, simulation.ledger, simulation.job
        self._kept: dict[Hashable, tuple[str, int]] = {}

    def held(self, key: Hashable) -> int:
        """Return the bytes under a key."""
        return self._kept.get(key, ("", 0))[1]

    def keep(self, key: Hashable, size: int, part: str = "buffers") -> None:
        """Hold exactly so many bytes under a key, instead of those before."""
        self.ledger.hold(part, size - self.held(key))
        self._kept[key] = part, size

    def drop(self, *keys: Hashable) -> None:
        """Free the bytes under these keys."""
        for part, size in (self._kept.pop(key) for key in keys if key in self._kept):
            self.ledger.hold(part, -size)

    def collective(self, size: int, *, more: int = 0) -> None:
        """Enter a moment of a collective over tensors of this size: gloo works on a copy. `more`: other bytes of this moment."""
        self.ledger.touch("workspace", more + (size if self.job.device.kind == "cpu" else 0))


def blas_workspaces(job: Job) -> int:
    """Return the bytes that cuBLAS keeps for the forward thread and the backward thread.

    aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`. AMD's GPU of the catalog
    is a gfx94. Its rocBLAS takes the most; hipBLASLt takes less.
    """
    if job.device.kind != "cuda":
        return 0
    if job.device.capability is None:
        return 2 * 128 * MiB
    return 2 * (32 * MiB if job.device.capability[0] in (9, 10, 12) else 8 * MiB + 128 * KiB)


def joined_experts(job: Job) -> int:
    """Return the elements of the largest weight that is joined from experts as they are read; 0 where the files join them."""
    assert job.spec is not None
    return max(each.elements for each in job.spec.parameters if each.role == "expert") if job.spec.copied else 0


def expert_copies(job: Job) -> int:
    """Return the bytes that loading needs in addition to the model, without its adapter: the experts of a layer.

    The files have them one by one, and they are joined from copies (transformers/core_model_loading.py). Where the files are
    of this dtype, what is read later still lies in the mapped file by then, which weighs more.
    """
    assert job.spec is not None
    dtype = job.compute_dtype if job.strategy.adapter != "none" else job.kept_dtype
    return 0 if job.spec.config.get("dtype") in (None, dtype) else joined_experts(job) * BYTES_OF[dtype]


def quantization_constants(job: Job) -> int:
    """Return the bytes of the constants of quantized weights, which every rank holds whole: of 8 bits, a scale a row."""
    if not job.strategy.quantized:
        return 0
    assert job.spec is not None
    packed = packed_names(job.spec, job.strategy.adapter)
    weights = [parameter for parameter in job.spec.parameters if parameter.name in packed]
    if job.strategy.adapter == "qlora8":
        return sum(4 * parameter.shape[0] for parameter in weights)
    return sum(packing_constants(parameter.elements) for parameter in weights)


def packing_constants(elements: int) -> int:
    """Return the bytes of a weight's constants: one for each 64 weights, four for each 256 of these, and both codes.

    Source: bitsandbytes/functional.py `QuantState`, with nested `state2`.
    """
    scales = ceil_div(elements, QUANT_BLOCK)
    return scales + 4 * ceil_div(scales, NESTED_BLOCK) + 4 * (16 + 256 + 1)


def gathers(job: Job, *, backward: bool = True, share: Callable[[State], float] | None = None) -> list[Transfer]:
    """Return the all-gathers of sharded parameters: each sends (N - 1)/N of them (Rajbhandari et al. 2020, section 7).

    `backward`: the parameters were freed after the forward. `share`: returns (N - 1)/N of each, where N differs.
    """
    ranks, compute, micro = job.parallelism.shard_size, BYTES_OF[job.compute_dtype], job.train_config.accumulation
    states = [(state, compute if state.trainable else BYTES_OF[state.dtype]) for state in parameters_of(job)]
    size = sum((share(state) if share else (ranks - 1) / ranks) * state.elements * each for state, each in states)
    phases = ("forward", "backward") if backward else ("forward",)
    return [Transfer(size, micro, phase, "ring", f"parameters, all-gathered for the {phase}") for phase in phases]


def host_transfers(job: Job, gradients: Sequence[Transfer] = ()) -> list[Transfer]:
    """Return an offload's transfers: gradients (unless given) and weights once a step, parameters in every pass."""
    offload = job.strategy.offload
    if offload == "none":
        return []
    states, ranks = parameters_of(job), job.parallelism.shard_size
    trained = trained_elements(job) / ranks
    back = trained * BYTES_OF[job.compute_dtype]
    size = trained * BYTES_OF[job.weight_dtype]
    transfers = [*gradients] or [Transfer(size, 1, "backward", "host", "gradients, to the host")]
    transfers.append(Transfer(back, 1, "nothing", "host", "updated parameters, from the host"))
    if offload == "cpu":
        shard, micro = sum(state.bytes for state in states) / ranks, job.train_config.accumulation
        for phase in ("forward", "backward"):
            transfers.append(Transfer(shard, micro, phase, "host", f"parameters, from the host for the {phase}"))
    return transfers
