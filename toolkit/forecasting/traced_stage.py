"""The trace of a pipeline stage: the model's own forward, in which other stages' modules pass the hidden states on."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from toolkit.engines.losses import loss_sum
from toolkit.engines.pipeline.anatomy import anatomy_of
from toolkit.engines.pipeline.stages import Relay, adding_nothing, calling, passing
from toolkit.engines.traces import TraceConfig
from toolkit.models import ModelSpec

if TYPE_CHECKING:
    import torch

    from toolkit.forecasting.tracker import Tracker

RECEIVED = "received"
"""Among a trace's inputs, the gradient that a stage is sent."""


def cut(model: Any, spec: ModelSpec, stage: tuple[int, int]) -> Relay:
    """Keep a stage's modules of a model that has no layers but the stage's, as `Stage` does on a rank."""
    from torch import nn

    parts, relay = anatomy_of(spec), Relay()
    kept = (parts.before if stage[0] == 0 else set()) | (parts.after if stage[1] == parts.count else set())
    for name in (parts.before | parts.after) - kept:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(name)
        other = calling(adding_nothing) if isinstance(module, nn.Embedding) else passing(module, Relay())
        setattr(model.get_submodule(owner), leaf, other)
    layers = list(model.get_submodule(parts.layers).children())

    def enter(_: Any, args: Any, kwargs: Any) -> Any:
        return ((relay.entering, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": relay.entering})

    def leave(_: Any, args: Any, output: Any) -> None:
        relay.leaving = output[0] if isinstance(output, tuple) else output

    if stage[0]:
        layers[0].register_forward_pre_hook(enter, with_kwargs=True)
    if stage[1] < parts.count:
        layers[-1].register_forward_hook(leave)
    return relay


def stage_inputs(inputs: dict[str, torch.Tensor], spec: ModelSpec, config: TraceConfig) -> dict[str, torch.Tensor]:
    """Return the inputs of a stage: hidden states and their gradient lie in buffers that are there before the step."""
    import torch

    assert config.stage is not None
    shape, dtype = (*inputs["input_ids"].shape, spec.hidden), getattr(torch, config.weights)
    first, end = config.stage
    result = dict(inputs)
    if first:
        del result["input_ids"]
        result["inputs_embeds"] = torch.empty(shape, dtype=dtype).requires_grad_()
    if end < anatomy_of(spec).count:
        del result["labels"]
        result[RECEIVED] = torch.empty(shape, dtype=dtype)
    return result


def stage_step(
    model: Any, inputs: dict[str, torch.Tensor], spec: ModelSpec, config: TraceConfig, tracker: Tracker, relay: Relay
) -> None:
    """Run forward and backward of a micro-batch as `Stage.compute` and torch's `stage_backward` do."""
    import torch

    inputs = dict(inputs)
    received = inputs.pop(RECEIVED, None)
    relay.entering = entering = inputs.get("inputs_embeds")
    tracker.mark("forward")
    cast = torch.autocast("cpu", getattr(torch, config.autocast)) if config.autocast else contextlib.nullcontext()
    with cast:
        if received is None:
            # Which positions are trained depends on the data: all is the most.
            leaving = loss_sum(model, {**inputs, "trained": torch.arange(inputs["labels"].numel())}, spec.kind)
        else:
            model.base_model(**inputs, use_cache=False)
            assert relay.leaving is not None
            leaving = relay.leaving.to(received.dtype)
    relay.entering = relay.leaving = None
    weighted = leaving * torch.ones(()) if received is None else leaving
    tracker.mark("backward")
    torch.autograd.backward((weighted,), (received,))
    if entering is not None:
        entering.grad = None  # sent
    del leaving, weighted
    tracker.mark("end")
