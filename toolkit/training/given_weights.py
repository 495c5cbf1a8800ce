"""The values that a module held when it came to `prepare`: they win over a file's, and an engine's are compared with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from toolkit.core.errors import StrategyMismatch
from toolkit.core.units import BYTES_OF, dtype_name
from toolkit.engines.base import engine_of
from toolkit.engines.deferred import is_deferred
from toolkit.engines.job import Job
from toolkit.engines.records import Prepared
from toolkit.engines.shards import MASTER, PARAMETER
from toolkit.models.hf_loading import first_names

if TYPE_CHECKING:
    import torch

CHUNK = 2**16
"""Elements that are hashed at once: it takes about 2 MB."""

LIMIT = 2**31
"""Elements of the largest model that is hashed; it takes seconds."""


class GivenWeights:
    """What a module's trained parameters held before `prepare`, without values that are only in the files or on other ranks."""

    def __init__(self, job: Job, model: torch.nn.Module, *, hashed: bool) -> None:
        """Look at a module. `hashed`: keep a hash of each parameter for `check`."""
        import torch
        from accelerate import PartialState
        from accelerate.utils import broadcast_object_list

        parameters: dict[str, Any] = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.shapes = {name: tuple(getattr(each, "ds_shape", each.shape)) for name, each in parameters.items()}
        """Shape of each trained parameter, by name."""
        self._names = first_names(model, buffers=False)
        main = PartialState().is_main_process  # its values count; a script may have read some on rank 0 alone
        whole = {name: each for name, each in parameters.items() if main and _is_whole(each)}
        least = BYTES_OF[job.compute_dtype]
        masters = engine_of(job.strategy).separate_masters and job.precision.mixed
        wide = {name: each.detach().cpu() for name, each in whole.items() if masters and each.element_size() > least}
        few = hashed and sum(each.numel() for each in whole.values()) <= LIMIT
        self._hashes: dict[str, tuple[str, str, int]] = {}
        """Name → kind of the shards to compare, the dtype to compare in, and the hash."""
        for name, each in whole.items() if few else ():
            narrow = each.element_size() < BYTES_OF[job.weight_dtype]
            dtype = dtype_name(each.dtype) if narrow else job.weight_dtype
            # A checkpoint's masters say more than a narrow copy of theirs.
            self._hashes[name] = PARAMETER if narrow or not masters else MASTER, dtype, value_hash(each.detach(), dtype)
        shared: list[Any] = [self._hashes, {name: (tuple(each.shape), each.dtype) for name, each in wide.items()}]
        broadcast_object_list(shared, from_process=0)
        self._hashes = shared[0]
        self.wide = {
            name: wide[name] if main else torch.empty(kind[0], dtype=kind[1]) for name, kind in shared[1].items()
        }
        """Rank 0's values in a wider dtype than the compute dtype, where the engine makes masters from rounded ones."""

    def check(self, prepared: Prepared) -> None:
        """Compare ties with the module's, and the engine's trained values with those that rank 0's held. A collective.

        Raises:
            StrategyMismatch: naming tied parameters that came untied, and the parameters with other values.
        """
        from accelerate.utils import broadcast_object_list, gather_object

        names = first_names(prepared.accelerator.unwrap_model(prepared.model), buffers=False)
        if untied := [f"{first}, {name}" for name, first in self._names.items() if names.get(name) != first]:
            raise StrategyMismatch(
                f"tied weights came untied: {untied[0]}. Nothing was trained. Check versions with `toolkit doctor`."
            )
        hashes: dict[str, dict[Any, int]] = {}
        for shard in engine_of(prepared.job.strategy).shards(prepared) if self._hashes else ():
            kind, dtype, _ = self._hashes.get(shard.name, ("", "", 0))
            if shard.kind == kind:
                place = (shard.box, shard.start, shard.tensor.numel())
                hashes.setdefault(shard.name, {})[place] = value_hash(shard.tensor, dtype)
        together: dict[str, dict[Any, int]] = {name: {} for name in self._hashes}
        for name, places in gather_object(list(hashes.items())):
            together[name].update(places)
        wrong = [[name for name, (*_, given) in self._hashes.items() if _wrapped(together[name].values()) != given]]
        broadcast_object_list(wrong, from_process=0)
        if wrong[0]:
            raise StrategyMismatch(
                f"{len(wrong[0])} of {len(self._hashes)} trained parameters do not have the values of the module that was given to "
                f"prepare; the first is {wrong[0][0]}. Nothing was trained. Check versions with `toolkit doctor`."
            )


def _is_whole(parameter: Any) -> bool:
    """Return whether this rank holds all values of a parameter."""
    return not (
        is_deferred(parameter)
        or hasattr(parameter, "device_mesh")
        or (hasattr(parameter, "ds_shape") and not parameter.numel())
    )


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as integers of the same bits."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])


def value_hash(tensor: torch.Tensor, dtype: str) -> int:
    """Return a hash of the values in a dtype: those of parts add up to the whole's. The order of elements does not count."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    return _wrapped(_mixed(bits_of(chunk.to(kind)).long()) for chunk in torch.split(tensor.reshape(-1), CHUNK))


def _mixed(bits: torch.Tensor) -> int:
    for factor in (0x2C1B3C6D, 0x297A2D39):  # as murmur3 mixes: each bit of a value changes all of its share
        bits = (bits ^ (bits >> 15)) * factor
    return int((bits ^ (bits >> 12)).sum())


def _wrapped(values: Iterable[int]) -> int:
    return sum(values) % 2**64
