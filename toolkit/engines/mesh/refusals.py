"""What tensor and expert parallelism refuse: models, strategies and degrees, with the reason and a fix. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterator

from toolkit.config.parallelism import Parallelism
from toolkit.core.errors import StrategyError
from toolkit.core.units import BYTES_OF, ceil_div
from toolkit.engines.job import Job
from toolkit.engines.mesh.plan import (
    COLWISE,
    EXPERTS,
    INSIDE,
    LATENT,
    LOCAL,
    PACKED,
    ROWWISE,
    SHARED,
    SUMMED,
    local_shape,
    plan_of,
    split_dimension,
    style_of,
)
from toolkit.engines.states import adapted
from toolkit.models import ModelSpec
from toolkit.models.varlen import DROPOUTS

ATTENTION = re.compile(r"att(n|ention)|mixer|temporal|query|key|value|qkv|\b[qkvo]_proj\b")
"""The name of a module in attention, where splitting it splits the heads."""
GROUPED = 16
"""Bytes of which torch's `grouped_mm` takes rows in multiples."""

SUPPORTED = {
    "sharding": (
        ("none", "ddp", "fsdp", "fsdp_grad_op", "hsdp"),
        "DeepSpeed loads the whole model on each rank before it divides layers",
    ),
    "adapter": (("none", "lora"), "only LoRA's matrices are divided among ranks"),
    "offload": (("none",), "parts over several meshes are not moved to the host"),
    "precision": (("bf16", "fp32", "bf16_pure"), "the loss scaler takes no tensors over several meshes"),
}
"""The values of `Strategy` that run with tensor parallelism, and why others do not."""
WITHOUT_EXPERTS = {"ddp": "experts are on other groups of ranks than the rest, and DDP has one"}
"""Those that do not run with expert parallelism, and why."""


def refuse(job: Job) -> None:
    """Refuse what tensor and expert parallelism cannot do yet.

    Raises:
        StrategyError: naming the value, what is expected, and a fix.
    """
    strategy, tp, ep = job.strategy, job.parallelism.tp, job.parallelism.ep
    degree, size = ("ep", ep) if ep > 1 else ("tp", tp)
    for name, (values, why) in SUPPORTED.items():
        choices = [each for each in values if ep == 1 or each not in WITHOUT_EXPERTS]
        value = getattr(strategy, name)
        if value not in choices:
            raise StrategyError(
                f"{name} {value!r} does not run with {degree} {size}: {WITHOUT_EXPERTS.get(value, why)}. Choose {name} "
                f"{' or '.join(choices)}, or --{degree} 1."
            )
    if strategy.sharding != "none" and job.parallelism.loss_size < 2:
        raise StrategyError(
            f"sharding {strategy.sharding!r} with tp {tp} needs at least {2 * tp} ranks; got {job.ranks}. "
            f"Choose {2 * tp} processes, or sharding 'none' for {tp}."
        )
    if strategy.sharding == "ddp" and strategy.unused_parameters != "refuse":
        raise StrategyError(
            f"unused_parameters {strategy.unused_parameters!r} does not run with tp {tp} and sharding 'ddp': gradients are "
            "averaged once a step, on all ranks. Leave it out, or choose sharding 'fsdp'."
        )
    if job.spec is not None and tp > 1 and strategy.adapter == "none":  # with one, FSDP divides what has been read
        _refuse_empty_parts(job, job.spec)
    if job.spec is not None and ep > 1 and strategy.adapter == "none":
        _refuse_empty_experts(job)
    for name, count, reasons in (("ep", ep, _unsplit_experts), ("tp", tp, _unsupported_reasons)):
        if job.spec is not None and count > 1 and (reason := next(reasons(job.spec, job.parallelism), None)):
            raise StrategyError(f"{name} {count} does not run {job.spec.architecture}: {reason}")
    if job.spec is not None and tp > 1:
        _refuse_narrow_experts(job, job.spec)
        _refuse_latent_adapters(job, job.spec)


def _refuse_narrow_experts(job: Job, spec: ModelSpec) -> None:
    """Refuse experts of which the ranks' parts would differ, or have rows that torch's kernel for experts does not take."""
    tp, plan, each = job.parallelism.tp, plan_of(spec, job.parallelism), BYTES_OF[job.compute_dtype]
    for parameter in spec.parameters:
        split = split_dimension(parameter, plan)
        if len(parameter.shape) < 3 or split is None or style_of(parameter.name, plan) == EXPERTS:
            continue
        size = parameter.shape[split] // (2 if style_of(parameter.name, plan) == PACKED else 1)
        why = f"{tp} does not divide the {size:,} units of its experts" if size % tp else ""
        if not why and (row := local_shape(parameter, plan, tp, 0)[-1] * each) % GROUPED:
            why = f"a row of a rank's part of an expert has {row} bytes, and torch's grouped_mm takes multiples of {GROUPED}"
        if why:
            raise StrategyError(
                f"tp {tp} does not run {spec.architecture}: {why} ({parameter.name}). Choose --ep {tp}, for whole experts a "
                "rank, or --tp 1 with sharding 'fsdp'."
            )


def _refuse_latent_adapters(job: Job, spec: ModelSpec) -> None:
    """Refuse an adapter on a latent product: its part of the rotary keys would get the gradients of one rank's heads."""
    if job.strategy.adapter == "none":
        return
    plan, targets = plan_of(spec, job.parallelism), adapted(spec, job.strategy.lora_targets)
    latent = {name for name in targets if style_of(f"{name}.weight", plan) == LATENT}
    if latent:
        others = sorted({name.rpartition(".")[2] for name in set(targets) - latent})
        raise StrategyError(
            f"tp {job.parallelism.tp} does not run with {job.strategy.adapter} on {min(latent)}, of which ranks share the heads "
            f"and not the product. Choose --lora-targets {','.join(others) or 'of other modules'}, or --tp 1."
        )


def _refuse_empty_parts(job: Job, spec: ModelSpec) -> None:
    """Refuse more ranks than the rows of a matrix that tp and FSDP both divide: transformers reads no empty part of one.

    And ranks that do not divide the experts: it reads parts without FSDP2's padding, which may be a whole expert.
    """
    tp, ranks, plan = job.parallelism.tp, job.parallelism.shard_size, plan_of(spec, job.parallelism)
    for each in spec.parameters:
        rows, experts = local_shape(each, plan, tp, 0)[0], len(each.shape) > 2
        empty = split_dimension(each, plan) is not None and ceil_div(rows, ranks) * (ranks - 1) >= rows
        if empty or (experts and rows % ranks):
            what = "experts" if experts else "rows on a tp rank"
            raise StrategyError(
                f"tp {tp} with sharding {job.strategy.sharding!r}: {each.name} has {rows} {what}, which its {ranks} ranks of "
                f"FSDP cannot share{' evenly' if experts else ''}. Choose fewer processes, sharding 'hsdp' with --dp-replicate, "
                "or --tp 1."
            )


def _refuse_empty_experts(job: Job) -> None:
    """Refuse ranks of FSDP that do not divide the experts of their ep rank, as in `_refuse_empty_parts`."""
    sizes, count = job.parallelism, job.spec.moe.experts if job.spec and job.spec.moe else 0
    own, ranks = count // sizes.ep, sizes.shard_size * sizes.tp // sizes.ep

    if own and job.strategy.sharding != "none" and own % ranks:
        fits = [copies for copies in range(2, ranks + 1) if ranks % copies == 0 and own % (ranks // copies) == 0]
        raise StrategyError(
            f"ep {sizes.ep} with sharding {job.strategy.sharding!r}: an ep rank has {own} of {count} experts, which its "
            f"{ranks} ranks of FSDP cannot share evenly. Choose fewer processes, or sharding 'hsdp' with "
            f"--dp-replicate {fits[0] * sizes.dp_replicate}."
        )


def _unsplit_experts(spec: ModelSpec, sizes: Parallelism) -> Iterator[str]:
    """Yield why experts cannot be shared, each with a fix."""
    experts = [parameter for parameter in spec.parameters if style_of(parameter.name, spec.ep_plan) == EXPERTS]
    odd = sorted(set(spec.ep_plan.values()) - {EXPERTS, "ep_dispatch_experts"})
    for refused, reason in (
        (spec.frozen or spec.kind != "causal", "only causal models of text alone run so far"),
        (spec.moe is None, "it has no experts"),
        (not experts, "transformers has no expert-parallel plan for it"),
        (odd, f"its plan has style {''.join(odd[:1])!r}, and only {EXPERTS} is known"),
    ):
        if refused:
            yield f"{reason}. Choose --ep 1 with sharding 'fsdp'."
    for parameter in experts:
        if (count := parameter.shape[0]) % sizes.ep:
            fits = [size for size in range(2, count + 1) if count % size == 0]
            yield f"{sizes.ep} does not divide its {count} experts. Choose --ep {fits[0]}."


def _unsupported_reasons(spec: ModelSpec, sizes: Parallelism) -> Iterator[str]:
    """Yield why a model cannot be split, each with a fix."""
    tp, divides = sizes.tp, (*COLWISE, *ROWWISE)
    styles = (*divides, SUMMED, PACKED, INSIDE, LATENT, LOCAL)
    plan = {name: style for name, style in plan_of(spec, sizes).items() if sizes.ep == 1 or name not in spec.ep_plan}
    odd = [f"{name!r} has style {style!r}" for name, style in plan.items() if style not in styles]
    halves = [group for group in spec.tied if 0 < sum(style_of(name, plan) in divides for name in group) < len(group)]
    half = " and ".join(halves[0]) if halves else ""
    flat = next(
        (each.name for each in spec.parameters if len(each.shape) != 3 and style_of(each.name, plan) == PACKED), ""
    )
    latent = LATENT in plan.values() and "qk_rope_head_dim" not in spec.config
    bare = sizes.ep == 1 and not spec.own_tp_plan and not any("*" in name for name in spec.tp_plan)
    selects = any(spec.config.get("activation_sparsity_pattern") or ()) and any(".mlp." in name for name in plan)
    for refused, reason in (
        (spec.frozen or spec.kind != "causal", "only causal models of text alone run so far"),
        (spec.own_tp_plan and not spec.tp_plan, "your tp_plan has no rules, so nothing would be split"),
        (bare, "transformers has no tensor-parallel plan for its layers"),
        (selects, "its MLP selects activations by their mean over the whole MLP"),
        (half, f"its plan splits one of {half}, which are tied, and leaves the other whole"),
        (flat, f"its plan has {PACKED!r} for {flat}, and only fused experts, of three dimensions, are split so"),
        (latent, f"its plan has {LATENT!r}, and its config has no qk_rope_head_dim"),
        (odd, f"in its plan {''.join(odd[:1])}, and only {', '.join(styles)} are known"),
    ):
        if refused:
            yield f"{reason}. Choose --tp 1 with sharding 'fsdp'."
    inside = tuple(name for name, style in plan.items() if style == INSIDE)  # in a mixer, say
    if not any(
        style != SUMMED and ATTENTION.search(name) for name, style in plan.items() if not name.startswith(inside)
    ):
        return  # all ranks compute all heads, from the same random numbers
    keys = spec.config.get("num_key_value_heads")
    shared = SHARED in plan_of(spec, sizes).values()
    for what, count in (("attention heads", spec.heads), ("key-value heads", keys)):
        if isinstance(count, int) and count % tp and not (shared and count == keys and spec.heads % tp == 0):
            fits = [size for size in range(2, count + 1) if count % size == 0 and spec.heads % size == 0]
            yield f"{tp} does not divide its {count} {what}. Choose --tp {fits[0] if fits else 1}."
    for name in DROPOUTS:
        if isinstance(rate := spec.config.get(name), int | float) and rate > 0:
            yield (
                f"{name} is {rate:g}, and each rank would draw the same mask for other heads. "
                f"Set {name} to 0 in config.json, or choose --tp 1."
            )
