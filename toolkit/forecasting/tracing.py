"""Trace a step without memory: every operator's allocations and releases, split at layers and gradients.

As a program, it traces each request, a pickle on standard input, and writes its traces as a line of JSON.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import os
import pickle
import select
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.config.tables import ATTENTIONS
from toolkit.core.process_lifecycle import import_libraries, skip_last_collection
from toolkit.engines.losses import loss_sum
from toolkit.engines.traces import Event, LayerStack, Trace, TraceConfig
from toolkit.forecasting.fake_kernels import replaced_kernels
from toolkit.forecasting.traced_model import (
    allocate,
    distribute,
    fake_mesh,
    local,
    pack,
    transform,
    truncate_layers,
    unwrap,
)
from toolkit.forecasting.traced_stage import cut, stage_inputs, stage_step
from toolkit.models import ModelSpec
from toolkit.models.hf_loading import auto_class, freeze, quiet_bars
from toolkit.models.varlen import separates_documents

if TYPE_CHECKING:
    import torch
    from torch import nn

    from toolkit.forecasting.tracker import Tracker


def trace_all(
    spec: ModelSpec, configs: Sequence[TraceConfig], batches: Sequence[int], seq_len: int, *, strict: bool = True
) -> list[list[Trace]]:
    """Trace each batch under each configuration. Failed traces are left out, but those of the first if `strict`."""
    traces: list[list[Trace]] = []
    for config in configs:
        try:
            traces.append([trace(spec, config, batch=batch, seq_len=seq_len) for batch in batches])
        except Exception:  # a later request for this configuration raises the error
            if strict and not traces:
                raise
            traces.append([])
    return traces


def trace(spec: ModelSpec, config: TraceConfig, *, batch: int, seq_len: int) -> Trace:
    """Trace one forward and backward of the shallow model."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_leaves

    from toolkit.forecasting.tracker import Tracker

    packed = separates_documents(spec, joined=False)
    with quiet_bars(shown=True), fake_mesh(config) as mesh:
        model = _build(spec, config)
        if mesh is not None:
            distribute(model, mesh, spec, config.expert_imbalance)
        outer = transform(model, config, spec)
        stacks = truncate_layers(model, spec, config.stage)
        outer.train()
        ends = _ends(outer, model)
        step = partial(stage_step, relay=cut(model, spec, config.stage)) if config.stage else _step
        tracker = Tracker(ends[2], width=spec.hidden, device=config.device)
        unwrap(model)
        with FakeTensorMode(allow_non_fake_inputs=True):
            allocate(model, sharded=mesh is not None)
            if config.stage is None:  # tied weights lie on different stages
                model.tie_weights()
            pack(model)
            inputs, first = (_inputs(spec, config, batch, seq_len, packed=packed) for _ in range(2))
            for tensor in [*model.parameters(), *model.buffers(), *tree_leaves(inputs)]:
                if isinstance(tensor, torch.Tensor):
                    tracker.know(local(tensor))
            if mesh is not None:  # the first step fills the cache of DTensor's sharding propagation
                with replaced_kernels(config):
                    step(model, first, spec, config, Tracker(device=config.device))
                model.zero_grad()
            _watch(model, stacks, tracker)
            with replaced_kernels(config), tracker:
                step(model, inputs, spec, config, tracker)
    return Trace(stacks=stacks, events=tuple(_fold_events(tracker.recorded())), ends=ends)


def _fold_events(events: list[Event]) -> Iterator[Event]:
    """Nest events of modules that begin at the same tensor: outer modules begin first and end last."""
    for what, together in itertools.groupby(events, key=lambda event: event[0]):
        if what in ("back in", "back out"):
            yield from sorted(together, key=lambda event: event[2].count("."), reverse=what == "back out")
        else:
            yield from together


def _ends(outer: Any, model: Any) -> tuple[str | None, str | None, str | None]:
    """Return the modules that accelerate's `fsdp2_prepare_model` finds; in PEFT's model it does not find every norm."""
    from accelerate.utils.fsdp_utils import _find_final_norm

    modules = (model.get_input_embeddings(), _find_final_norm(outer), model.get_output_embeddings())
    names = {module: name for name, module in model.named_modules()}
    return names.get(modules[0]), names.get(modules[1]), names.get(modules[2])


def _build(spec: ModelSpec, config: TraceConfig) -> Any:
    import torch
    from transformers import AutoConfig

    values = copy.deepcopy(spec.config)
    model_config = AutoConfig.for_model(values.pop("model_type"), **values)
    model_config.use_cache = False
    kernel = ATTENTIONS[config.attention]
    word = "sdpa" if kernel.joins_rows else kernel.transformers
    with torch.device("meta"):
        model = auto_class(spec).from_config(
            model_config, dtype=getattr(torch, config.weights), attn_implementation=word
        )
    freeze(model, spec)
    return model


def _inputs(spec: ModelSpec, config: TraceConfig, batch: int, seq_len: int, *, packed: bool) -> dict[str, torch.Tensor]:
    """Return this rank's part of a batch as `data.rows` makes it.

    `packed`: the model keeps documents of a row apart by their positions.

    Positions of every row make rotary embeddings of every row, even of one document. An `attention_mask` that masks nothing
    is left out: whether it does depends on its values, which fake tensors lack.
    """
    import torch

    shape = (batch, seq_len)
    names = ["input_ids", "labels"]
    if packed:
        names.append("position_ids")
    elif config.masked:
        names.append("attention_mask")
    inputs = {name: torch.zeros(shape, dtype=torch.long) for name in names}
    if config.job is not None:
        inputs = dict(config.job.split(inputs, 0, config.masked))
    return inputs if config.stage is None else stage_inputs(inputs, spec, config)


def _step(model: Any, inputs: dict[str, torch.Tensor], spec: ModelSpec, config: TraceConfig, tracker: Tracker) -> None:
    """Run the step of `Engine.forward_backward`. Like Accelerate, cast outputs of a forward under autocast to fp32."""
    import torch
    from accelerate.utils import convert_to_fp32

    cast = torch.autocast("cpu", getattr(torch, config.autocast)) if config.autocast else contextlib.nullcontext()

    def call(**inputs: torch.Tensor) -> Any:
        with cast:
            output = model(**inputs)
        return convert_to_fp32(output) if config.autocast else output

    call.config = model.config  # type: ignore[attr-defined]
    tracker.mark("forward")
    # Which positions are trained depends on the data: all is the most.
    loss = loss_sum(call, {**inputs, "trained": torch.arange(inputs["labels"].numel())}, spec.kind)
    weighted = loss * torch.ones(())
    del loss
    tracker.mark("backward")
    weighted.backward()  # type: ignore[no-untyped-call]
    del weighted
    tracker.mark("end")


def _watch(model: nn.Module, stacks: Sequence[LayerStack], tracker: Tracker) -> None:
    """Record the start and the end of each module, and each complete gradient.

    Modules without parameters count too: DeepSpeed prefetches when they begin, and FSDP2 gathers OLMo's head before a norm.
    """

    def on_gradient(name: str) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            size = local(parameter.grad).untyped_storage().nbytes()
            parameter.grad = None  # the engine frees it
            tracker.record("gradient", size, name)

        return hook

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(on_gradient(name))  # type: ignore[no-untyped-call]
    layers = {f"{stack.name}.{index}" for stack in stacks for index in range(len(stack.indices))}
    for name, module in model.named_modules():
        _watch_module(module, name, name in layers, tracker)


def _watch_module(module: nn.Module, name: str, layer: bool, tracker: Tracker) -> None:
    """Record a module's events. Its backward ends with the gradient of its inputs, before the next one begins, as in engines.

    Where a module's input is another's output, a tensor's own hooks run before its node's.
    """

    def mark(what: str) -> Any:
        return lambda _: tracker.mark(what, name, layer=layer)

    def before(_: Any, args: Any, kwargs: Any) -> None:
        tracker.mark("in", name, layer=layer)
        if (tensor := _first_trainable((args, kwargs))) is not None:
            tensor.register_hook(mark("back out"))  # type: ignore[no-untyped-call]

    def after(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        tracker.mark("out", name, layer=layer)
        tensor = _first_trainable(output)
        if tensor is not None and tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(mark("back in"))
        elif tensor is not None:  # under PEFT, embeddings return a leaf
            tensor.register_hook(mark("back in"))  # type: ignore[no-untyped-call]

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, with_kwargs=True)


def _first_trainable(values: Any) -> torch.Tensor | None:
    """Return the first tensor that needs a gradient."""
    import torch
    from torch.utils._pytree import tree_leaves

    leaves = tree_leaves(values)
    return next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad), None)


IDLE_SECONDS = 60.0
"""Seconds without a request after which the child ends."""


def main() -> None:
    """Answer requests in a child process, the only one that imports peft before a launch: a pickle each, and a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    skip_last_collection()
    import_libraries("transformers.modeling_utils")
    while select.select([sys.stdin.buffer], [], [], IDLE_SECONDS)[0]:
        try:
            spec, configs, batches, seq_len, strict = pickle.load(sys.stdin.buffer)
        except EOFError:  # the parent has ended
            return
        try:
            traces = trace_all(spec, configs, batches, seq_len, strict=strict)
            answer: Any = [[dataclasses.asdict(trace_) for trace_ in each] for each in traces]
        except Exception as error:
            answer = {"kind": type(error).__name__, "message": str(error) or repr(error)}
        print(json.dumps(answer, separators=(",", ":")), file=answers, flush=True)


if __name__ == "__main__":
    main()
