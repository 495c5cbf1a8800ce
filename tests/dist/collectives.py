"""Collectives of a process, counted as they are called, with the bytes that a rank sends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PARTS = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather_into_tensor": lambda ranks: ranks - 1,
    "reduce_scatter_tensor": lambda ranks: (ranks - 1) / ranks,
    "all_to_all_single": lambda ranks: (ranks - 1) / ranks,
}
"""Collective → the bytes that a rank sends, over the bytes of its input."""

PASSED_ON = ("wait_tensor", "_wrap_tensor_autograd")
"""Operators that send nothing."""


class Logits(TorchDispatchMode):
    """Notes the most rows of a tensor of logits over the whole vocabulary, of those that this rank's operators take or give."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.rows = vocab, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors come next
        given = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves((args, kwargs, given)):
            if type(each) is torch.Tensor and each.shape[-1:] == (self.vocab,):  # no fake one, of DTensor's dispatch
                self.rows = max(self.rows, each.numel() // self.vocab)
        return given


class Collectives(TorchDispatchMode):
    """Counts those of tensors with two or more dimensions in groups of `ranks`: activations and matrices, and no sums of steps."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.number: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors come next
        name = func._schema.name
        if name in ("c10d::allreduce_", *(f"_c10d_functional::{kind}" for kind in PARTS)):
            kind = "all_reduce" if name.startswith("c10d") else name.partition("::")[2]
            for tensor in args[0] if isinstance(args[0], list) else [args[0]]:
                if tensor.ndim > 1:
                    part = PARTS[kind](self.ranks)
                    if kind == "all_to_all_single" and (rows := args[2]):  # for each rank, which may be unequal
                        part = 1 - rows[torch.distributed.get_rank()] / max(1, sum(rows))
                    self.number[kind] += 1
                    self.bytes[kind] += round(tensor.numel() * tensor.element_size() * part)
        elif name.startswith(("c10d::", "_c10d_functional")) and not name.endswith(PASSED_ON):
            leaves = torch.utils._pytree.tree_leaves(args)
            if any(isinstance(each, torch.Tensor) and each.ndim > 1 for each in leaves):
                self.number[name] += 1
        return func(*args, **(kwargs or {}))
