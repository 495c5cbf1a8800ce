"""`--tp-sequence`: between its products a rank of a tensor-parallel group holds a part of the tokens (Korthikanti et al. 2022).

The stream is split before the first layer and gathered behind the last norm. Inside a layer, a module with products that are
split by outputs gathers its tokens once, and the product that is split by inputs scatters its sum. Norms see a rank's tokens.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from toolkit.core.errors import StrategyError
from toolkit.engines.job import Job, Transform
from toolkit.engines.mesh.plan import COLWISE, ROWWISE, SUMMED, plan_of, style_of
from toolkit.engines.registry import register_transform
from toolkit.models import ModelSpec
from toolkit.models.structure import module_lists

if TYPE_CHECKING:
    from torch import Tensor

KNOWN = (COLWISE[0], ROWWISE[0], SUMMED)
"""Styles of a layer's parts: the others give or take whole tensors."""


class SequenceParallel(Transform):
    """`--tp-sequence`, for layers of norms, attention and an MLP that take the hidden states first."""

    name = "tp_sequence"

    def settings(self, job: Job) -> bool | None:
        return job.strategy.tp_sequence or None

    def refuse(self, job: Job) -> None:
        strategy, tp, length = job.strategy, job.strategy.tp, job.train_config.seq_len
        if tp == 1:
            _refuse("splits rows over the ranks of a tp group, and tp is 1", "Give --tp 2, or leave it out.")
        if length % tp and strategy.cp == 1:  # context parallelism lengthens rows
            fix = f"Choose --seq-len {max(1, length // tp) * tp}."
            _refuse(f"splits rows over tp {tp}, which does not divide seq_len {length}", fix)
        for what, given in (
            (f"adapter {strategy.adapter!r}", strategy.adapter != "none"),
            ("--ep", strategy.ep > 1),
            ("--pp", strategy.pp > 1),
            ("--mlp-tiles", strategy.mlp_tiles != "none"),
        ):
            if given:
                _refuse(f"does not run with {what} yet", "Leave out one of the two.")
        if job.spec is None:
            return
        for name, value in job.spec.config.items():
            unused = name.startswith(("classifier", "summary"))  # of other tasks
            if "drop" in name and not unused and isinstance(value, int | float) and value > 0:
                what = f"would drop the same places of each rank's own tokens ({name} {value})"
                _refuse(what, f"Set {name} to 0 in config.json, or leave it out.")
        inside = {name: style for name, style in plan_of(job.spec, job.parallelism).items() if ".*." in name}
        odd = sorted(set(inside.values()) - set(KNOWN))
        if odd:
            _refuse(f"does not run {job.spec.architecture}: its layers have style {odd[0]!r}", "Leave it out.")

    def apply(self, model: Any, job: Job) -> Any:
        spec = cast("ModelSpec", job.spec)
        plan = plan_of(spec, job.parallelism)
        stacks = [(name, stack) for name, stack in module_lists(model) if spec.in_text(name)]
        ((path, layers),) = stacks
        weights: Any = layers.named_parameters(prefix=path)
        mesh = next(weight.device_mesh["tp"] for name, weight in weights if style_of(name, plan) in ROWWISE)
        for name, layer in layers.named_children():
            if dict(layer.named_parameters(recurse=False)):
                _refuse(f"does not know what {type(layer).__name__} does with parameters of its own", "Leave it out.")
            for leaf, part in layer.named_children():
                _split_part(part, f"{path}.{name}.{leaf}", plan, mesh)
        first: Any = next(iter(layers.children()))
        first.__class__ = _entry(type(first), mesh)
        owner = path.rpartition(".")[0]
        behind = list(model.get_submodule(owner).children())
        rest = [part for part in behind[behind.index(layers) + 1 :] if dict(part.named_parameters())]
        if len(rest) != 1:
            _refuse(
                f"needs one norm behind the layers of {type(model).__name__}, which has {len(rest)}", "Leave it out."
            )
        _sum_gradients(rest[0], mesh)
        rest[0].register_forward_hook(lambda _, args, output: _whole(output, mesh).to_local())
        return model


register_transform(SequenceParallel())


def _refuse(what: str, fix: str) -> NoReturn:
    raise StrategyError(f"tp_sequence {what}. {fix}")


def _split_part(part: Any, path: str, plan: Any, mesh: Any) -> None:
    """Let a part of a layer take and give a rank's tokens."""
    from torch.distributed.tensor import Shard
    from transformers.distributed.tensor_parallel import RowwiseParallel

    styles = {name: style_of(f"{name}.weight", plan) for name, _ in part.named_modules(prefix=path)}
    if not set(styles.values()) & {*COLWISE, *ROWWISE}:
        _sum_gradients(part, mesh)
        return
    if COLWISE[0] in styles.values():
        first = [*inspect.signature(type(part).forward).parameters.values()][1]
        part.register_forward_pre_hook(partial(_gather, mesh, first.name), with_kwargs=True)
    for name, module in part.named_modules(prefix=path):
        if styles[name] == ROWWISE[0]:
            module.forward = MethodType(type(module).forward, module)  # without the style that sums whole outputs
            RowwiseParallel(output_layouts=Shard(1)).install_forward(module, mesh)


def _sum_gradients(part: Any, mesh: Any) -> None:
    """Sum the gradients of a part that sees a rank's tokens."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    for module in part.modules():
        if dict(module.named_parameters(recurse=False)):
            ALL_PARALLEL_STYLES[SUMMED].install_forward(module, mesh)


def _whole(tokens: Tensor, mesh: Any) -> Any:
    """Return the tokens of all ranks as a DTensor; `tokens` [b, s / tp, h] are this rank's."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    local = DTensor.from_local(tokens, mesh, [Shard(1)], run_check=False)
    return local.redistribute(placements=[Replicate()])


def _gather(mesh: Any, name: str, module: Any, args: Any, kwargs: Any) -> Any:
    """Replace the first argument, this rank's tokens, by all. Its gradients are summed and scattered, once for all products."""
    if args:
        return (_whole(args[0], mesh), *args[1:]), kwargs
    return args, {**kwargs, name: _whole(kwargs[name], mesh)}


def _entry(layer_class: type[Any], mesh: Any) -> type[Any]:
    """Return the class of a first layer that splits its input outside of activation checkpointing, which then keeps a part."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    class Entry(layer_class):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if not args:
                _refuse(f"needs a {layer_class.__name__} that takes the hidden states first", "Leave it out.")
            hidden, *rest = args
            if hidden.shape[1] % mesh.size():
                _refuse(
                    f"splits rows over tp {mesh.size()}, which does not divide {hidden.shape[1]} tokens",
                    "Pad the rows.",
                )
            whole = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
            return super().__call__(whole.redistribute(placements=[Shard(1)]).to_local(), *rest, **kwargs)

    Entry.__name__, Entry.__qualname__ = layer_class.__name__, layer_class.__qualname__
    return Entry
