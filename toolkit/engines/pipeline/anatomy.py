"""Where a model can be cut into stages: its layers in order, and which modules run before and after them.

All of it is read off the order of calls in one forward of a twin without memory, and off no attribute of a class.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import Any

from toolkit.core.errors import StrategyError
from toolkit.engines.job import Job
from toolkit.engines.upstream import masks_known_from
from toolkit.models import ModelSpec
from toolkit.models.files import first_line
from toolkit.models.hf_loading import auto_class, quiet_bars
from toolkit.models.structure import module_lists


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The parts of a model in the order of its forward. Names are of modules."""

    layers: str
    """The list of layers."""
    count: int
    returns: int
    """Values of the tuple that a layer returns; 0 where it returns the hidden states alone."""
    before: frozenset[str]
    """Modules with parameters of their own that run before the layers, such as embeddings."""
    after: frozenset[str]
    """Those that run after them: the last norm and the head."""

    def places(self, parameter: str) -> list[int]:
        """Return the layer of a parameter or buffer; -1 for one before all layers, `count` for one after them."""
        module = name_in_spec(parameter).rpartition(".")[0]
        if module.startswith(f"{self.layers}."):
            return [int(module.removeprefix(f"{self.layers}.").partition(".")[0])]
        return [-1] * (module in self.before) + [self.count] * (module in self.after)


_ANATOMIES: dict[str, Anatomy] = {}


def name_in_spec(name: str) -> str:
    """Return the name in the bare model: of a parameter that an adapter has moved, and of the one that an adapter's belongs to."""
    return re.sub(r"\.(base_layer|lora_\w+\.default)(?=\.)", "", name.removeprefix("base_model.model."))


def anatomy_of(spec: ModelSpec) -> Anatomy:
    """Return the anatomy of a model, read once for each config: a stage's spec and a rank's have that of the whole model.

    Raises:
        StrategyError: for a model that does not pass its hidden states from layer to layer, naming what does not fit.
    """
    key = json.dumps(
        [spec.architecture, spec.kind, spec.frozen, spec.runs_code, spec.config], sort_keys=True, default=str
    )
    return _ANATOMIES.get(key) or _ANATOMIES.setdefault(key, _read(spec))


def _refuse(spec: ModelSpec, why: str) -> StrategyError:
    return StrategyError(f"--pp does not run {spec.architecture}: {why}. Choose --pp 1 with sharding 'fsdp'.")


def _twin(spec: ModelSpec) -> Any:
    """Build the model on the meta device. Kernels of experts take bf16 alone."""
    import torch
    from transformers import AutoConfig

    values = copy.deepcopy(spec.config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"), quiet_bars(shown=False):
        model = auto_class(spec).from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    return model.eval()


@dataclass
class _Forward:
    """What one forward of the twin calls and passes on."""

    name: str
    """The list of layers."""
    layers: list[Any]
    outside: list[str]
    """The other modules with parameters of their own."""
    calls: list[tuple[str, int]] = field(default_factory=list)
    """(module, -1), and ("begin" or "end", the layer's place)."""
    passed: list[Any] = field(default_factory=list)
    """The hidden states at the beginning and the end of each layer."""
    returns: set[int] = field(default_factory=set)
    """Values of the tuples that layers return; 0 where one returns the hidden states alone."""
    others: list[Any] = field(default_factory=list)
    """What layers take besides hidden states."""

    def begins(self, index: int, args: Any, kwargs: Any) -> None:
        """Note a layer's beginning."""
        from torch.utils._pytree import tree_leaves

        self.calls.append(("begin", index))
        rest = dict(kwargs)
        self.passed.append(args[0] if args else rest.pop("hidden_states", None))
        self.others.extend(tree_leaves((args[1:], rest)))

    def ends(self, index: int, output: Any) -> None:
        """Note a layer's end."""
        self.calls.append(("end", index))
        self.returns.add(len(output) if isinstance(output, tuple) else 0)
        self.passed.append(output[0] if isinstance(output, tuple) else output)


def _read(spec: ModelSpec) -> Anatomy:
    if spec.kind != "causal" or spec.frozen or spec.runs_code:
        raise _refuse(spec, "only causal models of text alone, of classes in transformers, run so far")
    forward = _run_twin(spec)
    order = [call for call in forward.calls if call[1] >= 0]
    _check_layers(spec, forward, order)
    name, calls = forward.name, forward.calls
    first, last = calls.index(order[0]), calls.index(order[-1])
    before, after = ({call[0] for call in part if call[1] < 0} for part in (calls[:first], calls[last:]))
    between = {call[0] for call in calls[first:last] if call[1] < 0}
    holders = {other for other in forward.outside if f"{name}.".startswith(f"{other}." if other else "")}
    for other in forward.outside:
        if other in between | holders or other not in before | after:
            raise _refuse(spec, f"no stage can hold {other or 'the parameters of the model itself'}")
    return Anatomy(
        layers=name,
        count=len(forward.layers),
        returns=forward.returns.pop(),
        before=frozenset(before),
        after=frozenset(after),
    )


def _run_twin(spec: ModelSpec) -> _Forward:
    """Run one forward of the twin, with hooks around its layers and before the other modules."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = _twin(spec)
    lists = [
        each for each in module_lists(model) if all(type(layer).__name__ in spec.blocks for layer in each[1].children())
    ]
    if not lists:
        raise _refuse(spec, "it has no list of layers")
    name, stack = max(lists, key=lambda each: sum(parameter.numel() for parameter in each[1].parameters()))
    outside = {
        other: module
        for other, module in model.named_modules()
        if any(each is not None for each in module._parameters.values()) and not other.startswith(f"{name}.")
    }
    forward = _Forward(name, list(stack.children()), list(outside))
    for index, layer in enumerate(forward.layers):
        layer.register_forward_pre_hook(lambda _, a, k, i=index: forward.begins(i, a, k), with_kwargs=True)
        layer.register_forward_hook(lambda _, a, output, i=index: forward.ends(i, output))
    for other, module in outside.items():
        module.register_forward_pre_hook(lambda _, a, n=other: forward.calls.append((n, -1)))
    with FakeTensorMode(allow_non_fake_inputs=True), masks_known_from({}), torch.enable_grad():
        model.to_empty(device="cpu")
        model.tie_weights()
        try:
            model(input_ids=torch.zeros((1, 2), dtype=torch.long), use_cache=False)
        except Exception as error:  # a model's own
            raise _refuse(
                spec, f"its forward in bf16 fails, from which its layers are read ({first_line(error)})"
            ) from error
    return forward


def _check_layers(spec: ModelSpec, forward: _Forward, order: list[tuple[str, int]]) -> None:
    """Refuse layers that do more than pass hidden states on. `order`: their calls."""
    name, passed, count = forward.name, forward.passed, len(forward.layers)
    if order != [(word, index) for index in range(count) for word in ("begin", "end")] or len(forward.returns) != 1:
        raise _refuse(spec, f"its forward does not call the layers of {name} one after the other")
    if any(passed[2 * i + 1] is not passed[2 * i + 2] for i in range(count - 1)):
        raise _refuse(spec, f"it changes the hidden states between two layers of {name}")
    if any(getattr(each, "requires_grad", False) for each in forward.others) or passed[0].shape != (1, 2, spec.hidden):
        raise _refuse(spec, "its layers pass more than one row of hidden states on")
    if any(str(each.dtype) != "torch.bfloat16" for each in passed):
        raise _refuse(spec, "it keeps hidden states in another dtype than its weights")
    if spec.config.get("layerdrop"):
        raise _refuse(spec, f"layerdrop {spec.config['layerdrop']} leaves out layers at random, on each stage others")
    if any(tied.startswith(f"{name}.") for group in spec.tied for tied in group):
        raise _refuse(spec, "its layers share parameters")


def places_of(job: Job, rank: int) -> set[int]:
    """Return the layers of a rank's stages, with -1 on the first stage and the number of layers on the last: `Anatomy.places`."""
    assert job.spec is not None
    stages, pp = job.settings["stages"], job.parallelism.pp
    mine: set[int] = set()
    for number, (first, end) in enumerate(stages):
        if number % pp == job.coordinates(rank).pp:
            mine.update(range(first, end))
            mine.update([-1] * (number == 0) + [end] * (number == len(stages) - 1))
    return mine


def held(job: Job, rank: int) -> frozenset[str]:
    """Return the canonical names of the parameters that a rank holds; a tied one may be on two ranks."""
    assert job.spec is not None
    parts, mine = anatomy_of(job.spec), places_of(job, rank)
    return frozenset(
        parameter.name
        for parameter in job.spec.parameters
        if any(mine.intersection(parts.places(name)) for name in job.spec.names_of(parameter.name))
    )


def local_job(job: Job, rank: int) -> Job:
    """Return the job with the parameters that a rank holds."""
    assert job.spec is not None
    cache: dict[Any, ModelSpec] = vars(job.spec).setdefault("_stage_specs", {})
    key = job.parallelism.pp, tuple(job.settings["stages"]), job.coordinates(rank).pp
    if key not in cache:
        names = held(job, rank)
        parameters = tuple(parameter for parameter in job.spec.parameters if parameter.name in names)
        cache[key] = dataclasses.replace(job.spec, parameters=parameters)
    return dataclasses.replace(job, spec=cache[key])
