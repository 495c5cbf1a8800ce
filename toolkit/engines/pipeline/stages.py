"""The stages of a rank: the model's own forward, in which the parts of other stages pass the hidden states on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from toolkit.core.errors import StrategyError
from toolkit.core.phases import phase
from toolkit.engines.job import Job
from toolkit.engines.losses import loss_kind, loss_sum, with_trained
from toolkit.engines.optimizer_step import to_device
from toolkit.engines.pipeline.anatomy import Anatomy
from toolkit.engines.pipeline.sharding import MESH, as_root, bare, sharded
from toolkit.engines.records import Prepared
from toolkit.engines.upstream import masks_known_from
from toolkit.models.hf_loading import set_tensor

if TYPE_CHECKING:
    import torch
    from torch import nn

    Batch = Mapping[str, torch.Tensor]


def hidden_dtype(job: Job) -> torch.dtype:
    """Return the dtype of the hidden states between layers: that of the weights, as a forward has them."""
    import torch

    whole = job.strategy.adapter == "none" and not sharded(job)
    return cast("torch.dtype", getattr(torch, job.weight_dtype if whole else job.compute_dtype))


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
        self._dtype = hidden_dtype(prepared.job)
        whole = bare(prepared.accelerator.unwrap_model(prepared.model))
        self.model = self._cut(whole, parts, *stages[number])
        self.module = calling(self.forward, model=self.model)
        if sharded(prepared.job):
            as_root(self.module, getattr(whole, MESH))
        # Before hooks of FSDP's, which copy tensors to the device: reading the number there would wait for it.
        self.module.register_forward_pre_hook(self._note_number, prepend=True, with_kwargs=True)
        self._number = 0
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

    def _note_number(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._number = int(kwargs["number"])

    def forward(self, given: torch.Tensor, number: torch.Tensor, *, logits: bool = False) -> torch.Tensor:
        """Compute one micro-batch: the loss sum on the last stage, else the hidden states [b, s, hidden].

        Args:
            given: hidden states; on the first stage anything.
            number: of the micro-batch, one element.
            logits: return logits [b, s, vocabulary] on the last stage.
        """
        import torch

        batch, relay = self.batches[self._number], self._relay
        if self._job.strategy.loss == "chunked" and self.is_last and not logits:
            batch = with_trained(batch)
        marked = phase("forward") if torch.is_grad_enabled() else nullcontext()
        with marked, masks_known_from(batch), self._autocast():
            # Labels reach the last stage's device alone.
            out = () if self.is_last and not logits else ("labels", "trained")
            inputs = to_device({name: one for name, one in batch.items() if name not in out}, self._accelerator.device)
            if not self.is_first:
                inputs |= {"inputs_embeds": given}
                del inputs["input_ids"]
            relay.entering, relay.leaving = None if self.is_first else given, None
            try:
                if self.is_last and not logits:
                    loss = loss_sum(self.model, inputs, self._kind)
                    self.sums.append(loss.detach())
                    return loss
                if self.is_last:
                    return cast("torch.Tensor", self.model(**inputs, use_cache=False).logits)
                self.model.base_model(**inputs, use_cache=False)
                leaving = cast("torch.Tensor", relay.leaving)
            finally:
                relay.entering = relay.leaving = None
        if torch.promote_types(leaving.dtype, self._dtype) != self._dtype:
            raise StrategyError(
                f"layers of {type(self.model).__name__} pass {leaving.dtype} on, and the stages exchange {self._dtype}, as its "
                "weights. Choose --precision fp32, or --pp 1."
            )
        return leaving.to(self._dtype)

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
