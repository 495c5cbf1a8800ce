"""The whole rows of a micro-batch, of which each rank of a context-parallel group has a part: what each query sees of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from toolkit.models.varlen import BOUNDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor


def zigzag(cp: int, size: int) -> list[Tensor]:
    """Return the places of each rank's tokens: a chunk from the row's beginning and one from its end, which see equally much."""
    import torch

    chunks = torch.arange(cp * size).view(2 * cp, -1)
    return [torch.cat((chunks[place], chunks[-1 - place])) for place in range(cp)]


@dataclass(eq=False)
class Rows:
    """The whole rows of a micro-batch, of which this rank has a part."""

    kind: str
    group: Any
    positions: Tensor
    """[b, s]: they begin again with each document."""
    padding: Tensor | None
    """[b, s], 0 for padding; None without."""
    masked: bool
    """Whether a row holds several documents, or padding."""
    part: slice | Tensor
    """The places of this rank's tokens."""
    joined: bool = False
    """Whether the kernel takes the bounds of documents in the place of a mask."""
    keys: Tensor | None = None
    """The places of the keys that this rank's queries see, of all rows one after the other; None for all."""
    uses: Uses = field(default_factory=lambda: Uses())

    def to(self, device: torch.device, non_blocking: bool = False) -> Rows:
        """Copy to a device."""
        moved = {name: getattr(self, name) for name in ("positions", "padding", "keys")}
        moved = {
            name: each if each is None else each.to(device, non_blocking=non_blocking) for name, each in moved.items()
        }
        return replace(self, **moved, uses=Uses())

    def documents(self, parts: Sequence[slice | Tensor]) -> tuple[dict[str, Any], Tensor | None]:
        """Return `BOUNDS` of the documents of this rank's queries, all rows joined into one, and `keys`.

        Under `gather` a document's queries are those of a chunk of this rank, and its keys end with the last of them.

        Args:
            parts: the places of the tokens of all ranks. Keys are gathered in this order.
        """
        import torch
        from torch.nn.functional import pad

        positions = self.positions.cpu()  # a batch may be on the device already
        places = torch.arange(positions.numel()).view_as(positions)
        begins = positions.diff(dim=-1, prepend=positions[:, :1] - 2) != 1  # each row begins one
        own = places[:, self.part] if self.kind == "gather" else places
        # A query begins a piece where a document does, and where the one before it is another rank's.
        first = begins.flatten()[own] | (own.diff(dim=-1, prepend=own[:, :1] - 2) != 1)
        starts = first.flatten().nonzero().flatten()
        lengths = pad(starts[1:], (0, 1), value=own.numel()) - starts
        stops = own.flatten()[starts] + lengths
        documents = places.flatten()[begins.flatten()]
        sources = documents[torch.searchsorted(documents, stops - 1, right=True) - 1]
        keys = torch.cat([torch.arange(*each) for each in zip(sources.tolist(), stops.tolist(), strict=True)])
        sizes = lengths, stops - sources
        sums = (pad(each.cumsum(0), (1, 0)).to(torch.int32) for each in sizes)
        bounds = dict(zip(BOUNDS, (*sums, *(int(each.max()) for each in sizes)), strict=True))
        keys = torch.cat([places[:, part] for part in parts], 1).flatten().argsort()[keys]
        return bounds, None if torch.equal(keys, places.flatten()) else keys

    def mask(self, window: int | None, own_queries: bool, *, implied: bool = True) -> Tensor | None:
        """Return which key each query sees, bool [b, 1, queries, s], made once for all layers.

        Args:
            window: tokens that a query sees back, itself included; None for all.
            own_queries: of this rank's queries alone.
            implied: return None where a query sees all tokens before it, as kernels do without a mask.
        """
        if implied and not (self.masked or own_queries or (window and window < self.positions.shape[1])):
            return None
        key = window, own_queries
        if key not in self.uses.masks:
            self.uses.masks[key] = self._make_mask(window, own_queries)
        return self.uses.masks[key]

    def _make_mask(self, window: int | None, own_queries: bool) -> Tensor:
        import torch

        keys = torch.arange(self.positions.shape[1], device=self.positions.device)
        queries = keys[self.part] if own_queries else keys
        distance = queries[:, None] - keys
        seen = (distance >= 0)[None, None]
        if window:
            seen = seen & (distance < window)
        if self.masked:
            documents = (self.positions.diff(dim=-1, prepend=self.positions[:, :1] - 1) != 1).cumsum(-1)
            own = documents[:, self.part] if own_queries else documents
            seen = seen & (own[:, None, :, None] == documents[:, None, None])
            if self.padding is not None:  # a query of padding sees itself, or its row would be no number
                seen = seen & (self.padding[:, None, None].bool() | (distance == 0))
        return seen


class Uses:
    """What all copies of rows share, and no dataclass: FSDP2 copies those where it casts the inputs of a module."""

    def __init__(self) -> None:
        """Count no call of the attention yet."""
        self.calls = 0
        self.masks: dict[Any, Tensor] = {}
