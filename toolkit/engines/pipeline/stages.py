"""The stages of a rank: the model's own forward, in which the parts of other stages pass the hidden states on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

from toolkit.core.phases import phase
from toolkit.engines.losses import loss_kind, loss_sum, with_trained
from toolkit.engines.optimizer_step import to_device
from toolkit.engines.pipeline.anatomy import Anatomy
from toolkit.engines.records import Prepared
from toolkit.engines.upstream import masks_known_from
from toolkit.models.hf_loading import set_tensor

if TYPE_CHECKING:
    import torch
    from torch import nn

    Batch = Mapping[str, torch.Tensor]


class Relay:
    """The hidden states [b, s, hidden] that enter a stage, and those that leave it."""

    def __init__(self) -> None:
        self.entering: torch.Tensor | None = None
        self.leaving: torch.Tensor | None = None


def calling(forward: Callable[..., Any], **attributes: Any) -> nn.Module:
    """Return a module with a function as its forward, and with attributes: modules among them become its children."""
    from torch import nn

    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    vars(module)["forward"] = forward
    return module


def passing(module: nn.Module, relay: Relay, *, returns: int = 0, role: str = "") -> nn.Module:
    """Return what stands in the place of a module of another stage: it returns its first input.

    The layer before a stage's first one (role `enter`) returns the hidden states that the stage was sent, so whatever the model
    does before its layers (scales, positions, dropout) counts once, on the first stage. The layer after its last one (role
    `leave`) keeps those to send. Attributes, such as a layer's kind of attention, stay: the model's forward may read them.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
        if role == "enter":
            hidden = relay.entering
        elif role == "leave":
            relay.leaving = hidden
        return (hidden, *[None] * (returns - 1)) if returns else hidden

    plain = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "forward"}
    return calling(forward, **plain)


def adding_nothing(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return zero, in the place of an embedding of another stage."""
    import torch

    return torch.zeros((), device=next(iter((*args, *kwargs.values()))).device)


class Stage:
    """Some layers of a model. torch's pipeline schedules call its `module` with the hidden states and a micro-batch's number.

    It shares its modules with the whole model. Only those that hold a replaced one are copies.
    """

    def __init__(self, prepared: Prepared, parts: Anatomy, number: int, stages: list[tuple[int, int]]) -> None:
        self.number, self.is_first, self.is_last = number, number == 0, number == len(stages) - 1
        self._job, self._relay = prepared.job, Relay()
        self._accelerator = prepared.accelerator
        self._kind = loss_kind(prepared.job, prepared.model)
        self.model = self._cut(prepared.accelerator.unwrap_model(prepared.model), parts, *stages[number])
        self.module = calling(self.forward, model=self.model)
        self.batches: list[Batch] = []
        """A step's micro-batches on the host, with shifted labels."""
        self.sums: list[torch.Tensor] = []
        """The loss sums of those that the last stage has done."""

    def _cut(self, model: nn.Module, parts: Anatomy, first: int, end: int) -> Any:
        from torch import nn

        replaced: dict[str, nn.Module] = {}
        for index in (*range(first), *range(end, parts.count)):
            name = f"{parts.layers}.{index}"
            role = {first - 1: "enter", end: "leave"}.get(index, "")
            replaced[name] = passing(model.get_submodule(name), self._relay, returns=parts.returns, role=role)
        kept = (parts.before if self.is_first else set()) | (parts.after if self.is_last else set())
        for name in (parts.before | parts.after) - kept:
            module = model.get_submodule(name)
            replaced[name] = calling(adding_nothing) if isinstance(module, nn.Embedding) else passing(module, Relay())
        return _copied(model, "", replaced)

    def forward(self, given: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """Compute one micro-batch: the loss sum on the last stage, else the hidden states [b, s, hidden].

        Args:
            given: hidden states; on the first stage anything.
            number: of the micro-batch, one element.
        """
        batch = self.batches[int(number)]
        if self._job.strategy.loss == "chunked" and self.is_last:
            batch = with_trained(batch)
        with phase("forward"):
            result = self.compute(batch, None if self.is_first else given)
        if self.is_last:
            self.sums.append(result.detach())
        return result

    def compute(self, batch: Batch, hidden: torch.Tensor | None, *, logits: bool = False) -> torch.Tensor:
        """Return hidden states, or on the last stage the loss sum; with `logits` the logits [b, s, vocabulary]."""
        import torch

        relay, device = self._relay, self._accelerator.device
        with masks_known_from(batch), self._autocast():
            inputs = to_device(batch, device)
            if hidden is not None:
                inputs |= {"inputs_embeds": hidden}
                del inputs["input_ids"]
            relay.entering, relay.leaving = hidden, None
            try:
                if self.is_last and not logits:
                    return loss_sum(self.model, inputs, self._kind)
                inputs = {name: each for name, each in inputs.items() if name not in ("labels", "trained")}
                if self.is_last:
                    return cast("torch.Tensor", self.model(**inputs, use_cache=False).logits)
                self.model.base_model(**inputs, use_cache=False)
                leaving = cast("torch.Tensor", relay.leaving)
                # Stages exchange one dtype, which holds any other's values.
                return leaving.to(getattr(torch, self._job.weight_dtype))
            finally:
                relay.entering = relay.leaving = None

    def _autocast(self) -> AbstractContextManager[Any]:
        return cast("AbstractContextManager[Any]", self._accelerator.autocast())


def _copied(module: nn.Module, path: str, replaced: Mapping[str, nn.Module]) -> nn.Module:
    """Return a shallow copy of a module with replaced submodules; those without one inside are shared."""
    clone = copy.copy(module)
    children: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        inner = f"{path}{name}"
        if inner in replaced:
            children[name] = replaced[inner]
        elif child is not None and any(each.startswith(f"{inner}.") for each in replaced):
            children[name] = _copied(child, f"{inner}.", replaced)
        else:
            children[name] = child
    vars(clone)["_modules"] = children
    vars(clone).pop("forward", None)  # another's, bound to the whole model
    return clone


def drop(model: nn.Module, names: frozenset[str]) -> None:
    """Move the parameters of a model that are not in `names` to the meta device: their names and shapes stay."""
    import torch
    from torch import nn

    others: dict[int, nn.Parameter] = {}
    kept = {id(each) for name, each in model.named_parameters() if name in names}
    for name, each in list(model.named_parameters(remove_duplicate=False)):
        if id(each) not in kept:
            if id(each) not in others:
                others[id(each)] = nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)
            set_tensor(model, name, others[id(each)])
