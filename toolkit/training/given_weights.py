"""The values that a module held when it came to `prepare`: they win over a file's, and an engine's are compared with them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from toolkit.core.errors import StrategyMismatch
from toolkit.core.units import BYTES_OF, dtype_name
from toolkit.engines.deferred import is_deferred
from toolkit.engines.job import Job
from toolkit.engines.rank_calls import from_main
from toolkit.engines.records import Prepared
from toolkit.engines.shards import MASTER, PARAMETER
from toolkit.models.hf_loading import first_names

if TYPE_CHECKING:
    import torch

SUM_SIZE = 2**16
"""Elements that are summed at once: it takes about 1 MB."""

MOST_SUMMED = 2**31
"""Elements of the largest model that is summed; it takes seconds."""


class GivenWeights:
    """What a module's trained parameters held before `prepare`, without values that are only in the files or on other ranks."""

    def __init__(self, job: Job, model: torch.nn.Module, *, hashed: bool) -> None:
        """Look at a module. `hashed`: keep a sum of each parameter's bits for `check`."""
        import torch
        from accelerate import PartialState

        parameters: dict[str, Any] = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.shapes = {name: tuple(getattr(each, "ds_shape", each.shape)) for name, each in parameters.items()}
        """Shape of each trained parameter, by name."""
        self._names = first_names(model, buffers=False)
        main = PartialState().is_main_process  # its values count; a script may have read some on rank 0 alone
        whole = {name: each for name, each in parameters.items() if main and _is_whole(each)}
        least = BYTES_OF[job.compute_dtype]
        masters = job.engine.keeps_masters(job)
        wide = {name: each.detach().cpu() for name, each in whole.items() if masters and each.element_size() > least}
        few = hashed and sum(each.numel() for each in whole.values()) <= MOST_SUMMED
        self._sums: dict[str, tuple[str, str, int]] = {}
        """Name → kind of the shards to compare, the dtype to compare in, and the sum of the values' bits."""
        for name, each in whole.items() if few else ():
            narrow = each.element_size() < BYTES_OF[job.weight_dtype]
            dtype = dtype_name(each.dtype) if narrow else job.weight_dtype
            # A checkpoint's masters say more than a narrow copy of theirs.
            self._sums[name] = PARAMETER if narrow or not masters else MASTER, dtype, value_sum(each.detach(), dtype)
        self._sums, kinds = from_main((self._sums, {name: (each.shape, each.dtype) for name, each in wide.items()}))
        self.wide = {name: wide[name] if main else torch.empty(kind[0], dtype=kind[1]) for name, kind in kinds.items()}
        """Rank 0's values in a wider dtype than the compute dtype, where the engine makes masters from rounded ones."""

    def check(self, prepared: Prepared) -> None:
        """Compare ties with the module's, and the engine's trained values with those that rank 0's held. A collective.

        Raises:
            StrategyMismatch: naming tied parameters that came untied, and the parameters with other values.
        """
        from accelerate.utils import gather_object

        names = first_names(prepared.accelerator.unwrap_model(prepared.model), buffers=False)
        if untied := [f"{first}, {name}" for name, first in self._names.items() if names.get(name) != first]:
            raise StrategyMismatch(
                f"tied weights came untied: {untied[0]}. Nothing was trained. Check versions with `toolkit doctor`."
            )
        sums: dict[tuple[Any, ...], int] = {}
        for shard in prepared.job.engine.shards(prepared) if self._sums else ():
            kind, dtype, _ = self._sums.get(shard.name, ("", "", 0))
            if shard.kind == kind:
                sums[shard.name, shard.box, shard.start, shard.tensor.numel()] = value_sum(shard.tensor, dtype)
        totals: Counter[str] = Counter()
        for (name, *_), part in dict(gather_object(list(sums.items()))).items():  # replicas count once
            totals[name] += part
        if wrong := from_main([name for name, (*_, given) in self._sums.items() if totals[name] != given]):
            raise StrategyMismatch(
                f"{len(wrong)} of {len(self._sums)} trained parameters do not have the values of the module that was given to "
                f"prepare; the first is {wrong[0]}. Nothing was trained. Check versions with `toolkit doctor`."
            )


def _is_whole(parameter: Any) -> bool:
    """Return whether this rank holds all values of a parameter."""
    return not (
        is_deferred(parameter)
        or parameter.is_meta
        or hasattr(parameter, "device_mesh")
        or (hasattr(parameter, "ds_shape") and not parameter.numel())
    )


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as integers of the same bits."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])


def value_sum(tensor: torch.Tensor, dtype: str, *, in_order: bool = False) -> int:
    """Return the sum of the values' bits in a dtype: those of parts add up to the whole's.

    `in_order`: times their places, so that equal values in another order have another sum.
    """
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, chunk in enumerate(torch.split(tensor.reshape(-1), SUM_SIZE)):
        bits = bits_of(chunk.to(kind))
        if in_order:
            bits = bits * torch.arange(number * SUM_SIZE + 1, number * SUM_SIZE + 1 + len(bits), device=bits.device)
        total += bits.sum(dtype=torch.int64)
    return int(total)
