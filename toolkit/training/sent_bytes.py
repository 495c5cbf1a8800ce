"""Bytes that a rank sends, counted at its collectives as they are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

SENT_FACTORS: dict[str, Callable[[int], float]] = {
    "allreduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "allgather": lambda ranks: ranks - 1,
    "reducescatter": lambda ranks: (ranks - 1) / ranks,
    "alltoall": lambda ranks: (ranks - 1) / ranks,
    **dict.fromkeys(("send", "broadcast", "reduce"), lambda ranks: 1),
}
"""Collective → the bytes that a rank of a ring sends, over the bytes of its input."""

OUTPUT_FIRST = ("allgather", "reducescatter", "alltoall")
"""Collectives of c10d with their output as the first argument."""


def counting_sent() -> Any:
    """Return a dispatch mode that counts, while it is entered, the bytes that this process would send.

    Its `by_collective` is a Counter.
    """
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    counted: Counter[str] = Counter()

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        by_collective = counted

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # its local tensors come next
            space, _, name = func._schema.name.partition("::")
            kind = next((each for each in SENT_FACTORS if name.replace("_", "").startswith(each)), None)
            if space in ("c10d", "_c10d_functional") and kind:
                given = args[1] if space == "c10d" and kind in OUTPUT_FIRST else args[0]
                size = sum(each.nbytes for each in tree_leaves(given))
                self.by_collective[kind] += round(SENT_FACTORS[kind](_ranks(tree_leaves(args))) * size)
            return func(*args, **(kwargs or {}))

    return Counting()  # type: ignore[no-untyped-call]


def _ranks(leaves: list[Any]) -> int:
    """Return the ranks of the group among an operator's arguments: the group, or its name, which comes last."""
    import torch
    from torch.distributed import ProcessGroup, distributed_c10d

    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject):
            return int(ProcessGroup.unbox(leaf).size())
    name = next(leaf for leaf in reversed(leaves) if isinstance(leaf, str))
    return int(vars(distributed_c10d)["_resolve_process_group"](name).size())
