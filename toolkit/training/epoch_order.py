"""The order of a prepared loader's rows: an epoch that is resumed in its middle repeats it.

`save_state` of Accelerate saves the generators as they are, and an order was drawn from them when its epoch began.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

from toolkit.checkpoints.randomness import read_generators, write_generators

if TYPE_CHECKING:
    import torch

    States = dict[str, torch.Tensor]


class EpochOrder:
    """The states of the generators that one loader's order is drawn from."""

    def __init__(self, loader: Any, source: Any) -> None:
        """Take the prepared loader, and its innermost sampler or its iterable dataset."""
        import torch

        self._loader = ref(loader)
        owners = (getattr(owner, "generator", None) for owner in (loader, source))
        self._own = [generator for generator in owners if isinstance(generator, torch.Generator)]
        self._begun: States = {}
        """When the last epoch began; empty before the first."""
        self._resumed: States = {}
        """To begin the next epoch with; empty without an epoch that was resumed in its middle."""
        self._ended = False
        self._left = False
        """The loop left the last epoch in its middle."""

    def iterate(self, batches: Iterator[Any], loader: Any) -> Iterator[Any]:
        """Yield the epoch's batches of the loader, or of one that skips its first batches."""
        resumed, self._resumed = self._resumed, {}
        if "left.epoch" in resumed and loader is self._loader():
            resumed = {}  # the loop left that epoch for this one
        now = self._read(loader)
        if resumed:
            write_generators(resumed)
            self._write_own(resumed)
        self._begun, self._ended, self._left = resumed or now, False, False
        try:
            for number, batch in enumerate(batches):
                if resumed and number == 0:
                    write_generators(now)  # the order is drawn
                self._ended = loader.end_of_dataloader
                yield batch
            self._ended = True
        finally:
            self._left = True
        if (prepared := self._loader()) is not None:
            prepared.iteration = loader.iteration

    def _read(self, loader: Any) -> States:
        import torch

        own = {f"own.{number}": generator.get_state() for number, generator in enumerate(self._own)}
        return {**read_generators(), **own, "epoch": torch.tensor(loader.iteration)}

    def _write_own(self, states: States) -> None:
        for number, generator in enumerate(self._own):
            generator.set_state(states[f"own.{number}"])

    def state(self) -> States:
        """Return what a resumed run needs: the states at the beginning of an epoch that has not ended, or those of now."""
        import torch

        states = self._read(self._loader())
        if self._resumed or (self._begun and not self._ended):
            left = {f"left.{name}": each for name, each in states.items()} if self._left else {}
            return {**left, **(self._resumed or self._begun), "middle": torch.tensor(True)}
        return {**states, "epoch": self._begun["epoch"] + 1} if self._begun else states

    def resume(self, states: States) -> None:
        """Begin the next epoch with these states."""
        left = {name.removeprefix("left."): each for name, each in states.items() if name.startswith("left.")}
        self._write_own(left or states)
        if (loader := self._loader()) is not None:
            loader.iteration = int(states["epoch"])
        self._resumed, self._begun = states if "middle" in states else {}, {}


def follow(loader: Any) -> str:
    """Follow the epochs of a prepared loader. Return the name of a source that may not repeat its order, or nothing."""
    _follow_loaders()
    source = shared = _shared(loader)
    while (inner := getattr(source, "batch_sampler", getattr(source, "sampler", None))) is not None:
        source = inner
    if isinstance(source, list | tuple):  # it is the order
        return ""
    shared._toolkit_order = order = EpochOrder(loader, source)  # an attribute: a dataclass is no key
    torchs = type(source).__module__.startswith("torch.utils.data")
    return "" if torchs or order._own or hasattr(source, "set_epoch") else type(source).__name__


def save(accelerator: Any, folder: str) -> None:
    """Write this rank's states of all prepared loaders."""
    from safetensors.torch import save_file

    states = {
        f"{number}.{name}": tensor.contiguous()
        for number, loader in enumerate(accelerator._dataloaders)
        if (order := _order_of(loader))
        for name, tensor in order.state().items()
    }
    save_file(states, _file(folder, accelerator.process_index))


def load(accelerator: Any, folder: str) -> None:
    """Read the states of all prepared loaders: this rank's, or those of rank 0. Print a line where the folder has none."""
    from safetensors.torch import load_file

    file = next((file for number in (accelerator.process_index, 0) if (file := _file(folder, number)).exists()), None)
    stored = load_file(file) if file else {}
    for number, loader in enumerate(accelerator._dataloaders):
        states = {name.removeprefix(f"{number}."): t for name, t in stored.items() if name.startswith(f"{number}.")}
        if states and (order := _order_of(loader)):
            order.resume(states)
    if file is None:
        problem = f"load_state: {folder} has no order of rows"
        accelerator.print(f"{problem}. An epoch that is resumed in its middle sees other rows.")


def _file(folder: str, rank: int) -> Path:
    return Path(folder, f"epoch_order_{rank}.safetensors")


def _shared(loader: Any) -> Any:
    """Return what `skip_first_batches` keeps of a loader: the iterable dataset, or the sampler of batches."""
    from accelerate.data_loader import SkipBatchSampler
    from torch.utils.data import IterableDataset

    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while isinstance(sampler, SkipBatchSampler):
        sampler = sampler.batch_sampler
    return sampler


def _order_of(loader: Any) -> EpochOrder | None:
    order: EpochOrder | None = getattr(_shared(loader), "_toolkit_order", None)
    return order


@functools.cache
def _follow_loaders() -> None:
    """Let each loader of Accelerate tell its order of its epochs, `accelerate.skip_first_batches` included."""
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

    def following(upstream: Any) -> Any:
        def iterate(self: Any) -> Iterator[Any]:
            order = _order_of(self)
            return upstream(self) if order is None else order.iterate(upstream(self), self)

        return iterate

    for kind in (DataLoaderShard, DataLoaderDispatcher):
        kind.__iter__ = following(kind.__iter__)
