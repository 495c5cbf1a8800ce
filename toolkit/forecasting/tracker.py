"""`Tracker`: every operator's allocations and releases. It derives from torch's class: import it late."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.autograd import function, graph
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from toolkit.core.units import dtype_name, round_up
from toolkit.engines.roofline import EFFICIENT
from toolkit.engines.traces import LOGITS, Event

aten = torch.ops.aten

WAIT = torch.ops._c10d_functional.wait_tensor.default
GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default

STILL = {aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
"""Operators other than views that read and write no byte."""


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every storage that is allocated while it is active, and its release."""

    def __init__(self, head: str | None = None, *, width: int = 0, device: str = "cpu") -> None:
        """Start empty.

        Args:
            head: the module that computes the logits.
            width: the hidden size. Tensors of this width, such as the weight's cast and gradients, are no logits.
            device: the kernels' device, `cpu` or `cuda`.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._head, self._width = head, width
        self._at_logits = False
        self.events: list[Event] = []
        self.layer = ""
        """The layer in its forward or backward."""
        self._backward = False
        self._work: Counter[tuple[str, str]] = Counter()
        self._known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        """Storage → whether it existed before."""
        self._numbers = itertools.count()
        self._alive: dict[int, Any] = {}
        self._released: dict[int, int] = {}
        """Index of a `-` in the events → number of the released storage."""

    def recorded(self) -> list[Event]:
        """Return the events, with storages that are freed together in the order of their allocation.

        Autocast frees its cast weights in the order of their addresses, which differ from trace to trace.
        """
        order: list[int] = []
        for freed, places in itertools.groupby(range(len(self.events)), key=self._released.__contains__):
            run = list(places)
            order += sorted(run, key=self._released.__getitem__) if freed else run
        return [self.events[place] for place in order]

    def know(self, tensor: torch.Tensor) -> None:
        """Ignore a storage that exists already."""
        self._known[tensor.untyped_storage()] = True

    def mark(self, what: str, name: str = "", *, layer: bool = False) -> None:
        """Record an event without a size; a layer's event names the layer that runs next."""
        self.record(what, 0, name)
        self._backward = self._backward or what == "backward"
        if name and name == self._head:
            self._at_logits = what in ("in", "out")
        if layer and (what.endswith("in") or name == self.layer):
            self.layer = name if what.endswith("in") else ""

    def record(self, what: str, size: int, name: str) -> None:
        """Record an event, after the operations since the previous one."""
        self.events += ((kind, amount, dtype) for (kind, dtype), amount in self._work.items())
        self._work.clear()
        self.events.append((what, size, name))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # they unwrap themselves first; the tensors inside count
        if func is WAIT:  # its fake kernel makes another tensor, the real one returns its argument
            return args[0]
        kwargs = kwargs or {}
        if func is aten.add.Tensor and self._backward and _adds_in_place(*args[:2]):
            func = aten.add_.Tensor
        output = func(*args, **kwargs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":  # some are made for their strides alone
                is_logits = self._at_logits and not (leaf.dim() > 1 and leaf.shape[-1] == self._width)
                self._count_storage(leaf.untyped_storage(), LOGITS if is_logits else "")
        scratch = SCRATCH[func](*args) if self._device == "cuda" and func in SCRATCH else 0
        # gloo gathers into a buffer of its own, and reduces in a copy of what it scatters.
        buffered = output if func is GATHER else args[0] if func is SCATTER else None
        gathered = 0 if buffered is None or self._device != "cpu" else buffered.untyped_storage().nbytes()
        self._count(func, args, kwargs, output, scratch)
        # Kernels with a workspace have these events at every length: traces of two lengths differ in sizes alone.
        for size in [scratch] * (func in SCRATCH) + [gathered] * bool(gathered):
            self.events += [("+", size, ""), ("-", size, "")]
        return output

    def _count(self, func: Any, args: Any, kwargs: Any, output: Any, scratch: int) -> None:
        """Count operations as torch does (matrix products, convolutions, attention), else bytes read and written."""
        # Queries of a fake tensor (`prim::device`) are dispatched too, and are no kernels.
        if func.is_view or func.namespace == "prim" or func._overloadpacket in STILL:
            return
        self._work["calls", ""] += 1
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func._overloadpacket in flop_registry:
            operations = int(flop_registry[func._overloadpacket](*_ungrouped(func, args), **kwargs, out_val=output))
            kernel = dtype_name(tensors[0].dtype) + (EFFICIENT if "efficient_attention" in func.name() else "")
            self._work["flops", kernel] += operations
            # Half, less a share of the blocks that the diagonal cuts.
            if (dict(zip(_names(func), args, strict=False)) | kwargs).get("is_causal"):
                self._work["skipped", kernel] += operations // 2
        else:
            results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            self._work["moved", ""] += 2 * scratch + sum(tensor.nbytes for tensor in (*tensors, *results))

    def _count_storage(self, storage: Any, part: str) -> None:
        if storage in self._known:
            return
        self._known[storage] = False
        size, key = storage.nbytes(), next(self._numbers)
        layer, backward = self.layer, self._backward
        self.events.append(("+", size, part))

        def on_release(_: Any) -> None:
            del self._alive[key]
            self._released[len(self.events)] = key
            outside = not self.layer or (layer != self.layer and not backward)
            self.events.append(("-", size, part or (layer if outside else "")))

        self._alive[key] = weakref.ref(storage, on_release)


ENGINE_USES, ENGINE_STORAGE_USES = 4, 2
"""References of a tensor and of its storage in `__torch_dispatch__`, where only autograd's buffer holds it beyond this call."""


def _adds_in_place(buffered: torch.Tensor, gradient: Any) -> bool:
    """Return whether autograd adds a second gradient into the first, which nothing else holds.

    It does so with plain tensors (torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`). A dispatch mode disables it, so
    the tracker repeats the decision. An addition inside a C++ backward formula with the same references counts, too.
    """
    if torch.is_grad_enabled() or not isinstance(gradient, torch.Tensor) or not _in_engine():
        return False
    storage_uses = torch._C._storage_Use_Count(buffered.untyped_storage()._cdata)
    uses = (buffered._use_count(), storage_uses)  # type: ignore[attr-defined]
    return uses == (ENGINE_USES, ENGINE_STORAGE_USES) and is_non_overlapping_and_dense_or_false(buffered)


def _in_engine() -> bool:
    """Return whether autograd's engine called the operator, and not a backward in Python."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in (function.__file__, graph.__file__):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == graph.__file__


@lru_cache
def _names(func: Any) -> tuple[str, ...]:
    """Return the names of an operator's arguments."""
    return tuple(argument.name for argument in func._schema.arguments)


def _ungrouped(func: Any, args: Any) -> Any:
    """Return an operator's arguments, keys and values with as many heads as the query: torch 2.11 counts no other attention."""
    place = _names(func).index("key") if "_scaled_dot_product" in func.name() else len(args)
    keys = [tensor[:, :1].expand(-1, args[place - 1].shape[1], -1, -1) for tensor in args[place : place + 2]]
    return (*args[:place], *keys, *args[place + 2 :])


def _flash_backward(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any) -> int:
    """Return the query's gradient in fp32, and grouped heads' own (flash_attn/flash_api.cpp, `mha_bwd`)."""
    batch, heads, length, width = query.shape
    rows = batch * heads * round_up(length, 128)
    grouped = 2 * batch * heads * key.shape[2] * width * key.element_size() if key.shape[1] != heads else 0
    return 4 * rows * (round_up(width, 32) + 1) + grouped


def _efficient_backward(grad: torch.Tensor, query: torch.Tensor, *_: Any) -> int:
    """Return the query's gradient in fp32 (mem_eff_attention/kernel_backward.h, `workspace_size`)."""
    batch, heads, length, width = query.shape
    rows = batch * heads * round_up(length, 64)
    return 4 * rows * (1 if query.dtype == torch.float32 else round_up(width, 64) + 1)


def _embedding_backward(grad: torch.Tensor, indices: torch.Tensor, words: int, *_: Any) -> int:
    """Return partial sums in fp32 from 3,072 tokens on (cuda/Embedding.cu, EmbeddingBackwardKernel.cu)."""
    tokens = indices.numel()
    return 4 * (min(tokens, words) + tokens // 10) * grad.shape[-1] if tokens > 3072 else 0


SCRATCH: dict[Any, Callable[..., int]] = {
    # Gradient times output (aten/src/ATen/native/cuda/SoftMax.cu, `softmax_backward_cuda_out`).
    aten._softmax_backward_data.default: lambda grad, *_: grad.nbytes,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
}
"""Operator → temporary bytes of its CUDA kernel, which no fake tensor shows."""
