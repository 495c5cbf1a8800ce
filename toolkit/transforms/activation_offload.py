"""`--activation-offload`: what a recomputed layer keeps, its input, waits for the backward in the host's memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from toolkit.core.errors import StrategyError
from toolkit.core.units import BYTES_OF, ceil_div
from toolkit.engines.job import Job, Transform
from toolkit.engines.records import Transfer
from toolkit.engines.registry import register_transform
from toolkit.models import ModelSpec

if TYPE_CHECKING:
    import torch


class ActivationOffload(Transform):
    """`--activation-offload`, with `full` or `every:K` checkpointing. On CPU ranks it copies, too: one memory is both."""

    name = "activation_offload"

    def settings(self, job: Job) -> bool | None:
        return job.strategy.activation_offload or None

    def refuse(self, job: Job) -> None:
        policy = job.strategy.activation_checkpointing
        if job.strategy.compile:
            raise StrategyError(
                "activation_offload does not run with compile: its copies would break the graphs. Leave out one of the two."
            )
        if job.spec is not None and not job.spec.checkpointed:
            raise StrategyError(
                f"activation_offload needs layers that are recomputed, and {job.spec.architecture} has no activation "
                "checkpointing. Leave out --activation-offload."
            )
        if not job.strategy.recomputed_share or policy in ("attention", "selective"):
            raise StrategyError(
                f"activation_offload needs layers that keep their inputs alone, and activation_checkpointing {policy!r} keeps "
                "more. Choose --activation-checkpointing full."
            )

    def apply(self, model: Any, job: Job) -> Any:
        host = Host(job.device.kind)
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False) and hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = partial(host.call, module._gradient_checkpointing_func)
        return model

    def host_bytes(self, job: Job) -> int:
        if job.device.kind == "cpu":
            return 0
        pp, micros = job.strategy.pp, job.train_config.accumulation
        flight = 1 if pp == 1 else micros if job.strategy.pp_schedule == "gpipe" else min(micros, pp)
        # Pinned memory comes in powers of two (ATen/core/CachingHostAllocator.h).
        return int(_layers(job) * flight * (1 << (_input_bytes(job) - 1).bit_length()))

    def communication(self, job: Job) -> list[Transfer]:
        """Return each layer's input, once to the host in the forward and once back in the backward."""
        if job.device.kind == "cpu":
            return []
        micros, size = job.train_config.accumulation, _layers(job) * _input_bytes(job)
        return [
            Transfer(size, micros, "forward", "host", "layers' inputs, to the host"),
            Transfer(size, micros, "backward", "host", "layers' inputs, from the host"),
        ]


register_transform(ActivationOffload())


def _layers(job: Job) -> float:
    """Return how many recomputed layers a rank has."""
    return job.strategy.recomputed_share * cast("ModelSpec", job.spec).layers / job.strategy.pp


def _input_bytes(job: Job) -> int:
    """Return the bytes of a layer's input, of one micro-batch. Under autocast it is in the weights' dtype."""
    spec, config = cast("ModelSpec", job.spec), job.train_config
    dtype = job.weight_dtype if job.engine.autocast_dtype(job) else job.compute_dtype
    return config.micro_batch * ceil_div(config.seq_len, job.strategy.token_parts) * spec.hidden * BYTES_OF[dtype]


class Slot:
    """A tensor that waits in the host's memory."""

    def __init__(self, tensor: torch.Tensor, previous: Slot | None) -> None:
        self.like: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
        self.shape = tensor.shape
        self.waits: torch.Tensor | None = None
        """On the host."""
        self.back: torch.Tensor | None = None
        self.copied: Any = None
        """The event after its last copy."""
        self.previous = previous
        """What was kept before it, and is needed after it."""
        self.done = False


class Host:
    """A model's tensors in the host's memory: pinned buffers that are used again, and a stream of their own for the copies.

    All copies are on that stream, so a buffer that is written again has been read.
    """

    def __init__(self, kind: str) -> None:
        """Take the kind of the job's device. In a trace for a GPU, tensors that are on the host take no memory of it."""
        self._kind = kind
        self._stream: Any = None
        self._free: dict[Any, list[torch.Tensor]] = {}
        self._last: Slot | None = None

    def call(self, checkpoint: Any, function: Any, *inputs: Any) -> Any:
        """Call a layer by `checkpoint`, which keeps its inputs alone."""
        import torch

        hidden = next((each for each in inputs if isinstance(each, torch.Tensor)), None)
        if hidden is None:
            raise StrategyError(
                "activation_offload: this model gives its layers no hidden states by position, so nothing could be moved. Leave "
                "it out."
            )
        if not torch.is_grad_enabled():
            return checkpoint(function, *inputs)
        with torch.autograd.graph.saved_tensors_hooks(partial(self.send, hidden.shape), self.fetch):
            return checkpoint(function, *inputs)

    def send(self, shape: torch.Size, tensor: torch.Tensor) -> Any:
        """Copy a tensor of this shape to the host while the device goes on. Others, such as masks, stay: layers share them."""
        import torch
        from torch._subclasses import FakeTensor

        if tensor.shape != shape:
            return tensor
        slot = self._last = Slot(tensor, self._last)
        if tensor.device.type != "cuda":
            traced = self._kind == "cuda" and isinstance(tensor, FakeTensor)
            slot.waits = None if traced else tensor.clone()
            return slot
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if (tensor.shape, tensor.dtype) not in self._free:
            self._free.clear()  # rows of other lengths would each keep a set of buffers
        kept = self._free.setdefault((tensor.shape, tensor.dtype), [])
        slot.waits = kept.pop() if kept else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            slot.waits.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return slot

    def fetch(self, slot: Any) -> torch.Tensor:
        """Return a tensor that `send` took, and begin to copy the one that is needed next."""
        import torch

        if not isinstance(slot, Slot):
            return cast("torch.Tensor", slot)
        if slot.done:
            raise StrategyError(
                "activation_offload has one backward for each forward. Add the losses, and call the backward once, or leave it out."
            )
        self._copy_back(slot)
        if slot.previous is not None and not slot.previous.done:
            self._copy_back(slot.previous)
        tensor, slot.back, slot.previous, slot.done = cast("torch.Tensor", slot.back), None, None, True
        self._last = None if self._last is slot else self._last
        if slot.copied is not None:
            torch.cuda.current_stream().wait_event(slot.copied)
            tensor.record_stream(torch.cuda.current_stream())
        return tensor

    def _copy_back(self, slot: Slot) -> None:
        import torch

        if slot.back is not None:
            return
        if self._stream is None:
            slot.back = torch.empty(slot.shape, **slot.like) if slot.waits is None else slot.waits
            return
        waits = cast("torch.Tensor", slot.waits)
        with torch.cuda.stream(self._stream):
            slot.back = torch.empty(slot.shape, **slot.like)
            slot.back.copy_(waits, non_blocking=True)
            slot.copied = self._stream.record_event()
        if (waits.shape, waits.dtype) in self._free:
            self._free[waits.shape, waits.dtype].append(waits)
        slot.waits = None
