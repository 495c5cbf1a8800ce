"""A running model's trained weights: rank 0 gathers whole tensors from the shards of all ranks, whatever the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints.layout import Region
from toolkit.core.units import dtype_name
from toolkit.engines.base import engine_of
from toolkit.engines.records import Prepared
from toolkit.engines.shards import BUFFER, MASTER, PARAMETER, Shard, copy, narrow, parts, whole_box

if TYPE_CHECKING:
    import torch


def is_adapter(module: Any) -> bool:
    """Return whether PEFT put an adapter on the model, by this package or by the user."""
    return hasattr(module, "peft_config")


class EngineWeights:
    """Tensors of a running model by canonical name: masters where an engine keeps them, else parameters; and buffers.

    Of an adapter what is trained; of a model that `load` read what its source does not freeze; of a user's own everything.
    """

    kind = "running model"

    def __init__(self, prepared: Prepared) -> None:
        """Exchange which rank holds which regions. A collective."""
        import torch
        from accelerate.utils import gather_object

        torch.cuda.empty_cache()  # NCCL's buffers for `send` and `recv` lie outside torch's cache
        accelerator, job = prepared.accelerator, prepared.job
        self._rank, self._device = accelerator.process_index, accelerator.device
        module = accelerator.unwrap_model(prepared.model)
        parameters = dict(module.named_parameters())
        if is_adapter(module):
            names = [name for name, p in parameters.items() if p.requires_grad]
        else:
            names = [name for name in parameters if job.spec is None or job.spec.trains(name)]
        self._mine: dict[tuple[str, str], list[Shard]] = {}
        for shard in engine_of(job.strategy).shards(prepared):
            self._mine.setdefault((shard.name, shard.kind), []).append(shard)
        regions = {key: [Region.of(key[1], shard) for shard in shards] for key, shards in self._mine.items()}
        facts = {key: (shards[0].shape, shards[0].tensor.dtype) for key, shards in self._mine.items()}
        ranks = gather_object([(regions, facts)])
        known = {key: value for _, part in ranks for key, value in part.items()}
        self._keys = {name: (name, MASTER if (name, MASTER) in known else PARAMETER) for name in names}
        if not is_adapter(module):
            self._keys |= {name: (name, kind) for name, kind in known if kind == BUFFER}
        self._regions = {key: [held.get(key, []) for held, _ in ranks] for key in self._keys.values()}
        self._dtypes: dict[str, torch.dtype] = {name: known[key][1] for name, key in self._keys.items()}
        self.shapes: Mapping[str, tuple[int, ...]] = {name: known[key][0] for name, key in self._keys.items()}
        self.dtypes: Mapping[str, str] = {name: dtype_name(dtype) for name, dtype in self._dtypes.items()}
        self.rounded = frozenset(
            name for name in self._keys if not getattr(parameters.get(name), "requires_grad", False)
        )
        self.sources: Mapping[str, str] = {name: name for name in self._keys}
        self.trained = self._keys.keys() - self.rounded
        self._whole: dict[str, torch.Tensor] = {}

    def gather(self, names: Sequence[str]) -> None:
        """Put these tensors together in rank 0's host memory, in place of those gathered before. A collective."""
        self._whole.clear()
        for name in names:
            whole = self._gather(name)
            if whole is not None:
                self._whole[name] = whole

    def tensor(self, name: str) -> torch.Tensor:
        """Return a gathered tensor. Rank 0 alone has them."""
        return self._whole[name]

    def _gather(self, name: str) -> torch.Tensor | None:
        """Return one whole tensor on rank 0, None elsewhere. Equal regions (replicas) are sent once."""
        import torch
        import torch.distributed as dist

        key = self._keys[name]
        mine = self._mine.get(key, [])
        senders: dict[Region, tuple[int, int]] = {}
        for owner, regions in enumerate(self._regions[key]):
            for index, region in enumerate(regions):
                senders.setdefault(region, (owner, index))
        if self._rank != 0:
            for owner, index in senders.values():
                if owner == self._rank:
                    dist.send(mine[index].tensor.reshape(-1).contiguous().to(self._device), 0)
            return None
        whole = torch.empty(self.shapes[name], dtype=self._dtypes[name])
        for region, (owner, index) in senders.items():
            if owner == 0:
                copy(parts(mine[index]), [(whole_box(whole.shape), whole)])
            else:
                self._receive(region, owner, whole)
        return whole

    def _receive(self, region: Region, owner: int, whole: torch.Tensor) -> None:
        """Receive a region into its place, directly where that is contiguous and in the memory that collectives use."""
        import torch
        import torch.distributed as dist

        box = whole_box(whole.shape)
        if region.whole:
            place = narrow((box, whole), region.box)
        elif region.box == box:
            place = whole.view(-1)[region.start : region.start + region.length]
        else:
            place = None
        if place is not None and place.is_contiguous() and self._device.type == "cpu":
            dist.recv(place.view(-1), owner)
            return
        values = torch.empty(region.stored_shape, dtype=whole.dtype, device=self._device)
        dist.recv(values.view(-1), owner)
        shard = Shard(region.name, region.kind, tuple(whole.shape), region.box, region.start, values)
        copy(parts(shard), [(box, whole)])
