"""Traces of a step, as engines read them: what was allocated and freed, in which module. Standard library only.

`forecasting` makes a trace of a shallow model and spreads it over the whole depth; an engine's simulation reads the segments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from toolkit.config.tables import ATTENTIONS
from toolkit.engines.job import Job


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """The inputs of activations besides model, batch and sequence. Many strategies share one."""

    weights: str
    """torch's name of the dtype that the weights have in the forward; with an adapter the frozen ones."""
    trained: str
    """torch's name of the dtype that the trained weights have in the forward."""
    autocast: str | None
    """The dtype of autocast, or None. Under it the model's outputs are cast to fp32."""
    attention: str
    masked: bool
    """Whether attention gets a mask: where a row holds several documents, or padding."""
    device: str
    """`cpu` or `cuda`: kernels differ."""
    flash: bool = True
    """Whether the device runs `scaled_dot_product_attention`'s flash kernel: compute capability 8.0 or more."""
    transforms: tuple[tuple[str, Hashable], ...] = ()
    """Name and settings of each transform of the job."""
    job: Job | None = field(default=None, compare=False, repr=False)
    """The job of the transforms. Traces with equal settings are equal, whatever else differs."""
    saves_inputs: bool = False
    """Whether a linear module saves its input even though its weight is frozen."""
    tp: int = 1
    """Ranks of a tensor-parallel group."""
    tp_rank: int = 0
    """The rank's place in that group."""
    ep: int = 1
    """Ranks of an expert-parallel group."""
    expert_imbalance: float = 1.0
    """The job's."""
    stage: tuple[int, int] | None = None
    """The layers (first, end) of a pipeline stage; None for the whole model."""

    @property
    def ranks(self) -> int:
        """Ranks that the trace communicates with."""
        ranks = max(self.tp, self.ep)
        if self.job is not None:
            for transform in self.job.transforms:
                ranks *= transform.ranks(self.job)
        return ranks


def trace_config(job: Job, *, masked: bool, autocast: str | None) -> TraceConfig:
    """Return the configuration of a job's trace; `autocast`: torch's name of its dtype, or None.

    Under autocast the weights keep the dtype that they are trained in, else they have the compute dtype. Accelerate casts what
    a forward under autocast returns to fp32; the other engines leave it.
    """
    strategy = job.strategy
    trained = job.weight_dtype if autocast else job.compute_dtype
    return TraceConfig(
        weights=trained if strategy.adapter == "none" else job.compute_dtype,
        trained=trained,
        autocast=autocast,
        attention=strategy.attention,
        masked=masked and not ATTENTIONS[strategy.attention].joins_rows,
        device=job.device.kind,
        flash=(job.device.capability or (8, 0)) >= (8, 0),
        expert_imbalance=job.expert_imbalance,
        transforms=tuple((transform.name, transform.settings(job)) for transform in job.transforms),
        job=job,
    )


WHOLE = ("forward", "backward", "end")
"""Events of the whole step."""

LOGITS = "logits"
"""The name of tensors between the head's forward and its backward: logits, copies, the loss, and their gradient."""

Event = tuple[str, int, str]
"""Kind, size and name of an event.

- `+`, `-`: bytes of a storage that is allocated or freed. Outside of the layers a `-` names the layer that allocated it. Both
  name `LOGITS` for a tensor of the head or the loss.
- `gradient`: bytes and name of a parameter with a complete gradient.
- `in`, `out`: begin and end of a module's forward, recomputation included; `back in`, `back out`: of its backward. Modules are
  the layers, and every module with a parameter of its own.
- `forward`, `backward`, `end`: of the whole step.
- `flops`: operations in the dtype of the name, or by that kernel, as torch counts them; `skipped`: the part that a causal
  attention kernel omits.
- `moved`: bytes that operators other than matrix products read and write; `calls`: operators.
"""


@dataclass(frozen=True, kw_only=True)
class LayerStack:
    """A module list of layers: the layers that were kept, and the kind of each layer of the whole model."""

    name: str
    kinds: tuple[int, ...]
    """Of every layer of the whole model, in order."""
    indices: tuple[int, ...]
    """Indices of the layers that were kept: the first two and the last of each kind."""

    def source(self, layer: int) -> int:
        """Return the index, among the kept layers, of the one that stands for a layer of the whole model.

        The first and the last of a kind stand for themselves, the second for all between: what is made once in a
        forward belongs to the first layer, what is made once in a backward to the last.
        """
        same = [index for index in self.indices if self.kinds[index] == self.kinds[layer]]
        return self.indices.index(layer if layer in same else same[1])

    def repeated_layers(self) -> Iterator[tuple[str, str, int]]:
        """Yield each kept layer that stands for several: its name, the first name of its kind, their number."""
        counts = Counter(self.source(layer) for layer in range(len(self.kinds)))
        for place, count in counts.items():
            first = self.source(self.kinds.index(self.kinds[self.indices[place]]))
            if count > 1:
                yield f"{self.name}.{place}", f"{self.name}.{first}", count


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One forward and backward of a shallow model."""

    stacks: tuple[LayerStack, ...]
    events: tuple[Event, ...]
    ends: tuple[str | None, str | None, str | None]
    """Names of the input embedding, of the norm behind the last layer, and of the head."""
    others: tuple[Trace, ...] = ()
    """Traces of the other simulated ranks, in the order of `Engine.simulated_ranks`; empty where all ranks are alike."""

    def alike(self, other: Trace) -> bool:
        """Return whether two traces differ in sizes alone."""
        return len(self.events) == len(other.events) and all(
            first[0] == second[0] and first[2] == second[2]
            for first, second in zip(self.events, other.events, strict=True)
        )

    def scaled(self, other: Trace, times: int) -> Trace | None:
        """Return this trace plus `times` the difference to `other`; None where the two differ in more than sizes."""
        if not self.alike(other):
            return None
        events = tuple(
            (what, size + times * (second - size), name)
            for (what, size, name), (_, second, _) in zip(self.events, other.events, strict=True)
        )
        return replace(self, events=events)


class Segment(NamedTuple):
    """Activations between two events, in bytes."""

    rise: int
    """The highest total above the one at its beginning; at least 0."""
    net: int
    """The total at its end above the one at its beginning, without complete gradients."""
    logits_rise: int
    """The part of `rise` that is logits, or tensors that the loss makes of them."""
    logits_net: int
    """The part of `net` that is logits."""
    what: str
    """The event at its end."""
    size: int
    name: str
    flops: tuple[tuple[str, int], ...] = ()
    """Operations, by torch's name of the dtype or the kernel, as torch counts them."""
    skipped: tuple[tuple[str, int], ...] = ()
    """The part of them that a causal attention kernel omits."""
    moved: int = 0
    """Bytes that operators other than matrix products read and write."""
    calls: int = 0
    """Operators that are not views."""
