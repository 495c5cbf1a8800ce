"""A running model's trained weights: rank 0 gathers whole tensors from the shards of all ranks, whatever the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from toolkit.checkpoints.importers import Entry, Weights
from toolkit.checkpoints.layout import Region
from toolkit.core.units import dtype_name
from toolkit.engines.base import engine_of
from toolkit.engines.records import Prepared
from toolkit.engines.shards import BUFFER, MASTER, PARAMETER, Shard, copy, parts, whole_box
from toolkit.engines.states import SEND_CHUNK


def is_adapter(module: Any) -> bool:
    """Return whether PEFT put an adapter on the model, by this package or by the user."""
    return hasattr(module, "peft_config")


class EngineWeights:
    """Tensors of a running model by canonical name: masters where an engine keeps them, else parameters; and buffers.

    Of an adapter what is trained; of a model that `load` read what its source does not freeze; of a user's own everything.
    """

    def __init__(self, prepared: Prepared) -> None:
        """Exchange which rank holds which regions. A collective."""
        import torch
        from accelerate.utils import gather_object

        torch.cuda.empty_cache()  # the buffers of collectives lie outside torch's cache
        accelerator, job = prepared.accelerator, prepared.job
        self._rank, self._device = accelerator.process_index, accelerator.device
        module = accelerator.unwrap_model(prepared.model)
        parameters = dict(module.named_parameters())
        self._mine: dict[tuple[str, str], list[Shard]] = {}
        for shard in engine_of(job.strategy).shards(prepared):
            self._mine.setdefault((shard.name, shard.kind), []).append(shard)
        regions = {key: [Region.of(shard) for shard in shards] for key, shards in self._mine.items()}
        local_facts = {key: (shards[0].shape, shards[0].tensor.dtype) for key, shards in self._mine.items()}
        ranks = gather_object([(regions, local_facts)])
        facts = {key: value for _, part in ranks for key, value in part.items()}
        if is_adapter(module):
            names = [name for name, parameter in parameters.items() if parameter.requires_grad]
        else:
            names = [name for name in parameters if job.spec is None or job.spec.trains(name)]
        keys = {name: (name, MASTER if (name, MASTER) in facts else PARAMETER) for name in names}
        if not is_adapter(module):
            keys |= {name: (name, kind) for name, kind in facts if kind == BUFFER}
        # By tensor: its regions, each with the first rank that holds it and the place among that rank's shards.
        self._senders: dict[str, dict[Region, tuple[int, int]]] = {name: {} for name in keys}
        for name, key in keys.items():
            for owner, (regions, _) in enumerate(ranks):
                for index, region in enumerate(regions.get(key, ())):
                    self._senders[name].setdefault(region, (owner, index))
        self._keys, self._whole = keys, dict[str, torch.Tensor]()
        self._facts = {name: facts[key] for name, key in keys.items()}
        entries = {
            name: Entry(
                tuple(shape),
                dtype_name(dtype),
                partial(self._whole.__getitem__, name),
                trained=getattr(parameters.get(name), "requires_grad", False),
                source=name,
            )
            for name, (shape, dtype) in self._facts.items()
        }
        self.weights = Weights("running model", entries)
        """Rank 0 alone can read them, after `gather`."""

    def gather(self, names: Sequence[str]) -> None:
        """Put these tensors together in rank 0's host memory, in place of those gathered before. A collective.

        Equal regions (replicas) are sent once. A broadcast of `SEND_CHUNK` bytes at most on the main group needs no new
        communicator, and no memory beside the tensor that grows with it.
        """
        import torch

        self._whole.clear()
        for name in names:
            shape, dtype = self._facts[name]
            whole = torch.empty(shape, dtype=dtype) if self._rank == 0 else None
            for region, (owner, index) in self._senders[name].items():
                for shard in self._send(region, owner, index):
                    if whole is not None:
                        copy(parts(shard), [(whole_box(shape), whole)])
            if whole is not None:
                self._whole[name] = whole

    def _send(self, region: Region, owner: int, index: int) -> Iterator[Shard]:
        """Send a region from `owner` to all ranks, and yield it there in parts. Rank 0's own are yielded there alone."""
        import torch
        import torch.distributed as dist

        (shape, dtype), key = self._facts[region.name], self._keys[region.name]
        shard = self._mine[key][index] if owner == self._rank else None
        if owner == 0:
            if shard is not None:
                yield shard
            return
        flat = None if shard is None else shard.tensor.detach().reshape(-1)
        step = max(1, SEND_CHUNK // dtype.itemsize)
        for start in range(0, region.length, step):
            length = min(step, region.length - start)
            if flat is None:
                values = torch.empty(length, dtype=dtype, device=self._device)
            else:
                values = flat[start : start + length].to(self._device)
            dist.broadcast(values, owner)
            yield Shard(region.name, region.kind, tuple(shape), region.box, region.start + start, values)
