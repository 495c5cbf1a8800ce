"""Tensor- and expert-parallel plans by arithmetic: their limits, the shapes on a rank, and the transfers. Standard library only."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.config.parallelism import Parallelism
from toolkit.core.errors import StrategyError
from toolkit.core.units import BYTES_OF, ceil_div
from toolkit.engines.job import Job
from toolkit.engines.records import Transfer
from toolkit.engines.states import State, adapted
from toolkit.models import ModelSpec, Parameter, generic_name
from toolkit.models.varlen import DROPOUTS

SHARED = "colwise_shared_heads"
"""Splits keys and values where several ranks use one head: its output is that head, whole on each of them."""
COLWISE = ("colwise", "colwise_gather_output", "embedding_rowwise", SHARED)
"""Styles that split the first dimension of a weight, and of a bias."""
PRODUCTS = tuple(style for style in COLWISE if style != "embedding_rowwise")
"""Those of matrix products: their inputs' gradients are sums over the ranks."""
ROWWISE = ("rowwise", "rowwise_split_input")
"""Styles that split the second dimension of a weight; a bias stays whole. The second takes a whole input (Phi-3)."""
SUMMED = "replicated_with_grad_allreduce"
"""A weight that each rank holds whole. Its gradient is summed over the ranks."""
GATHERED = "colwise_gather_output"
PACKED, INSIDE = "packed_colwise", "moe_tp_experts"
"""Splits fused experts inside, each of the matrices that are packed in one; and the module with them, its output is a sum."""
LATENT = "mla_kv_a_proj"
"""A whole product for all heads: a latent that others split, and the keys' rotary part, of which gradients are summed."""
LOCAL = "local_params"
"""A module with bare parameters that are split, such as attention's sinks. Its forward sees the rank's part of them."""
EXPERTS = "grouped_gemm"
"""Splits fused experts by their first dimension, over the ranks of an expert-parallel group."""
ADAPTER = re.compile(r"(.+)\.(lora_[AB])\.default\.weight")
"""The name of a half of an adapter: its module, and which one."""

PART = re.compile(r"(.+\.\d+\.[^.]+)\.")
"""The part of a layer that a parameter is in."""
LAYER = re.compile(r"(.+?\.\d+)\.")
ATTENTION = re.compile(r"att(n|ention)|mixer|temporal|query|key|value|qkv|\b[qkvo]_proj\b")
"""The name of a module in attention, where splitting it splits the heads."""
NORM_BEHIND = re.compile(r"\.post_(feedforward|mlp|ff)\w*norm")
"""A layer, and a norm of what its last part gives."""

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


def _refuse_empty_parts(job: Job, spec: ModelSpec) -> None:
    """Refuse more ranks than the rows of a matrix that tp and FSDP both divide: transformers reads no empty part of one."""
    tp, ranks, plan = job.parallelism.tp, job.parallelism.shard_size, plan_of(spec, job.parallelism)
    split = (each for each in spec.parameters if split_dimension(each, plan) is not None)
    rows = {each.name: local_shape(each, plan, tp, 0)[0] for each in split}
    name = min(rows, key=rows.__getitem__, default="")
    if name and ceil_div(rows[name], ranks) * (ranks - 1) >= rows[name]:
        raise StrategyError(
            f"tp {tp} with sharding {job.strategy.sharding!r}: {name} has {rows[name]} rows on a tp rank, fewer than its {ranks} "
            "ranks of FSDP can share. Choose fewer processes, sharding 'hsdp' with --dp-replicate, or --tp 1."
        )


def _refuse_empty_experts(job: Job) -> None:
    """Refuse ranks of FSDP of which one would get none of the experts of its ep rank: transformers reads no empty part."""
    sizes, count = job.parallelism, job.spec.moe.experts if job.spec and job.spec.moe else 0
    own, ranks = count // sizes.ep, sizes.shard_size * sizes.tp // sizes.ep

    def leaves_one_out(ranks: int) -> bool:
        return ranks > 1 and ceil_div(own, ranks) * (ranks - 1) >= own

    if own and job.strategy.sharding != "none" and leaves_one_out(ranks):
        fits = [copies for copies in range(2, ranks + 1) if ranks % copies == 0 and not leaves_one_out(ranks // copies)]
        raise StrategyError(
            f"ep {sizes.ep} with sharding {job.strategy.sharding!r}: an ep rank has {own} of {count} experts, which its "
            f"{ranks} ranks of FSDP cannot share: one would get none. Choose fewer processes, or sharding 'hsdp' with "
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
    bare = sizes.ep == 1 and not spec.own_tp_plan and not any("*" in name for name in spec.tp_plan)
    selects = any(spec.config.get("activation_sparsity_pattern") or ()) and any(".mlp." in name for name in plan)
    for refused, reason in (
        (spec.frozen or spec.kind != "causal", "only causal models of text alone run so far"),
        (spec.own_tp_plan and not spec.tp_plan, "your tp_plan has no rules, so nothing would be split"),
        (bare, "transformers has no tensor-parallel plan for its layers"),
        (selects, "its MLP selects activations by their mean over the whole MLP"),
        (half, f"its plan splits one of {half}, which are tied, and leaves the other whole"),
        (odd, f"in its plan {''.join(odd[:1])}, and only {', '.join(styles)} are known"),
    ):
        if refused:
            yield f"{reason}. Choose --tp 1 with sharding 'fsdp'."
    for parameter in spec.parameters:
        if style_of(parameter.name, plan) == PACKED and (width := parameter.shape[-2] // 2) % tp:
            fits = [size for size in range(2, width + 1) if width % size == 0]
            yield f"{tp} does not divide the {width} columns of its experts. Choose --tp {fits[0]}, or --ep."
    if not any(style != SUMMED and ATTENTION.search(name) for name, style in plan.items()):
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


def style_of(name: str, plan: Mapping[str, str]) -> str | None:
    """Return the plan's style of a parameter, by its own name or its module's; None where it is replicated."""
    generic = generic_name(name)
    return plan.get(generic) or plan.get(generic.rpartition(".")[0])


def plan_of(spec: ModelSpec, sizes: Parallelism) -> dict[str, str]:
    """Return the styles in use: the tensor-parallel plan's, without modules that an expert-parallel plan names, and that plan's.

    With fewer heads of keys than ranks, a multiple of them, several ranks share a head.
    """
    experts = dict(spec.ep_plan) if sizes.ep > 1 else {}
    inside = tuple(f"{name}." for name in experts)
    dense = spec.tp_plan if sizes.tp > 1 else {}
    heads = spec.config.get("num_key_value_heads")
    shared = isinstance(heads, int) and heads < sizes.tp and sizes.tp % heads == 0
    of_heads = {(name, COLWISE[0]): SHARED for name in dense if shared and name.endswith((".k_proj", ".v_proj"))}
    return {
        name: of_heads.get((name, style), style)
        for name, style in dense.items()
        if name not in experts and not name.startswith(inside)
    } | experts


def split_dimension(parameter: Parameter | State, plan: Mapping[str, str]) -> int | None:
    """Return the dimension of a parameter that the ranks share; None where each holds it whole.

    Of an adapter's halves B is split like the rows of its matrix, and A like the columns.
    """
    if half := ADAPTER.fullmatch(parameter.name):
        style = style_of(f"{half[1]}.weight", plan)
        return {("lora_B", True): 0, ("lora_A", False): 1}.get((half[2], style in COLWISE)) if style else None
    style = style_of(parameter.name, plan)
    if style in (*COLWISE, EXPERTS):
        return 0
    if style == PACKED:
        return len(parameter.shape) - 2
    return len(parameter.shape) - 1 if style in ROWWISE and len(parameter.shape) > 1 else None


def local_shape(parameter: Parameter, plan: Mapping[str, str], tp: int, tp_rank: int, ep: int = 1) -> tuple[int, ...]:
    """Return the shape of the part that a rank of the group holds: equal parts rounded up, the last ones smaller."""
    dim = split_dimension(parameter, plan)
    if dim is None:
        return parameter.shape
    size = parameter.shape[dim]
    if style_of(parameter.name, plan) == EXPERTS:  # all ranks hold equally many
        tp, tp_rank = ep, 0
    each = ceil_div(size, tp)
    part = max(0, min(size, (tp_rank + 1) * each) - tp_rank * each)
    return (*parameter.shape[:dim], part, *parameter.shape[dim + 1 :])


def local_job(job: Job, rank: int = 0) -> Job:
    """Return the job as a rank's data-parallel group sees it: without this parallelism, with the rank's local shapes.

    Under `ddp` as one process that shares its checkpoints with the others: this engine averages the gradients.
    """
    data = {} if job.engine.sharded else {"dp_replicate": 1, "cp": 1, "tp": job.parallelism.loss_size}  # type: ignore[attr-defined]
    spec = None if job.spec is None else _local_spec(job.spec, job.parallelism, job.coordinates(rank).tp)
    return dataclasses.replace(
        job,
        strategy=dataclasses.replace(job.strategy, tp=1, ep=1),
        parallelism=dataclasses.replace(job.parallelism, **{"tp": 1, "ep": 1, **data}),
        spec=spec,
        engine=job.engine.inner,  # type: ignore[attr-defined]
    )


def _local_spec(spec: ModelSpec, sizes: Parallelism, tp_rank: int) -> ModelSpec:
    # A spec is frozen, and so is what follows from it: it is made once for all jobs of a plan, and lives as long as the spec. A
    # spec holds its model's config, a dictionary, so it can be no key of a cache; `cached_property` writes into `vars()`, too.
    cache: dict[Any, ModelSpec] = vars(spec).setdefault("_local_specs", {})
    key = sizes.tp, tp_rank, sizes.ep
    if key not in cache:
        plan = plan_of(spec, sizes)
        shapes = (local_shape(parameter, plan, *key) for parameter in spec.parameters)
        parameters = (
            dataclasses.replace(parameter, shape=shape)
            for parameter, shape in zip(spec.parameters, shapes, strict=True)
        )
        cache[key] = dataclasses.replace(spec, parameters=tuple(parameters))
    return cache[key]


def experts_apart(job: Job) -> dict[str, int]:
    """Return the modules with experts, and how many ranks hold the same ones: FSDP shards each over those."""
    sizes = job.parallelism
    if job.spec is None or sizes.ep == 1:
        return {}
    ranks = sizes.shard_size * sizes.tp // sizes.ep
    return {name: ranks for name, style in job.spec.ep_plan.items() if style == "ep_dispatch_experts"}


def is_even(spec: ModelSpec, sizes: Parallelism) -> bool:
    """Return whether all ranks of a group hold equally large parts of every parameter."""
    return _local_spec(spec, sizes, 0).parameters == _local_spec(spec, sizes, sizes.tp - 1).parameters


def transfers(job: Job, autocast: str | None) -> list[Transfer]:
    """Return what a rank sends inside its tensor- and its expert-parallel group in a step. Nothing computes meanwhile.

    An all-reduce sends 2 (N - 1)/N of a tensor, an all-gather (N - 1)/N. Under autocast the embedding's sum and the
    gradients of activations are in fp32. Activation checkpointing repeats the forward of the layers, without its last sum. An
    exchange of tokens sends (N - 1)/N of them, to the experts and back, in the forward and in the backward, if the router is
    balanced. All wait for the rank with the most tokens.
    """
    spec, tp = job.spec, job.parallelism.tp
    assert spec is not None
    plan = plan_of(spec, job.parallelism)
    tokens = job.train_config.micro_batch * ceil_div(job.train_config.seq_len, job.parallelism.cp)
    compute = BYTES_OF[job.compute_dtype]
    widest = BYTES_OF[job.weight_dtype] if autocast else compute
    repeated = 1 + job.strategy.recomputed_share
    rank, targets = job.strategy.lora_rank, set[str]()
    if job.strategy.adapter != "none":
        targets = {f"{name}.weight" for name in adapted(spec, job.strategy.lora_targets)}
    once = _last_sums(spec, plan) - targets
    summed = gathered = backward = scattered = 0.0
    inputs: dict[str, float] = {}
    taken: dict[tuple[str, int], float] = {}
    for name, shape in _weights(spec):
        style, part = style_of(name, plan), PART.match(name) if job.strategy.tp_sequence else None
        times = 1 if name in once else repeated
        if part and style in COLWISE:
            inputs[part[1]] = tokens * shape[1] * widest
        elif part and style in ROWWISE:
            scattered += (times + 1) * tokens * shape[0] * compute
        elif style in ROWWISE:
            summed += times * tokens * shape[0] * compute
            gathered += tokens * shape[1] * compute if style != ROWWISE[0] else 0  # gradients of the whole input
        elif style == LATENT:
            backward += tokens * spec.config["qk_rope_head_dim"] * compute
        elif style == "embedding_rowwise":
            summed += tokens * shape[1] * widest
        elif style in COLWISE:  # products of one module take one input
            taken[name.rsplit(".", 2)[0], shape[1]] = tokens * shape[1] * widest
            if style == GATHERED and shape[0] != spec.vocab:
                gathered += repeated * tokens * shape[0] * compute
            elif style == GATHERED and job.strategy.loss == "whole":
                gathered += tokens * shape[0] * compute
            elif style == SHARED:  # and its gradients are reduce-scattered
                gathered += (repeated + 1) * tokens * shape[0] * compute
    for name, shape in ((name, shape) for name, shape in _weights(spec) if name in targets):
        style = style_of(name, plan)
        if style in (COLWISE[0], SHARED):
            backward += tokens * rank * compute
            gathered += (repeated + 1) * tokens * shape[0] * compute if style == SHARED else 0
        elif style == ROWWISE[0]:
            summed += repeated * tokens * rank * compute
        elif style is not None:  # the half that is split is gathered
            gathered += repeated * rank * shape[0 if style in COLWISE else 1] * widest
    if spec.moe is not None and tp > 1:
        for module, reads in _experts_inside(spec, plan).items():
            summed += (repeated if reads else 1) * tokens * spec.hidden * widest
            taken[module, spec.hidden] = tokens * (spec.hidden * widest + spec.moe.active * BYTES_OF["float32"])
    if inputs:  # the stream is split once and gathered once, too
        scattered += (repeated + 1) * sum(inputs.values()) + 2 * tokens * spec.hidden * widest
    backward += sum(taken.values())
    share, micro = (tp - 1) / tp, job.train_config.accumulation
    dense = [
        Transfer(2 * share * summed, micro, "nothing", "tp", "activations, all-reduced in the tp group"),
        Transfer(share * gathered, micro, "nothing", "tp", "whole outputs, all-gathered in the tp group"),
        Transfer(2 * share * backward, micro, "nothing", "tp", "activations' gradients, all-reduced in the tp group"),
    ]
    if inputs:
        dense.append(
            Transfer(share * scattered, micro, "nothing", "tp", "tokens, gathered and scattered in the tp group")
        )
    names = (parameter.name for parameter in spec.parameters)
    routed = len({name.rpartition(".")[0] for name in names if style_of(name, plan) == EXPERTS})
    experts = _expert_transfers(job, spec, (1 + repeated) * routed * tokens * spec.hidden * compute)
    return [*dense, *experts] if tp > 1 else experts[:1]


def _last_sums(spec: ModelSpec, plan: Mapping[str, str]) -> set[str]:
    """Return each layer's last product that is split by inputs, where the backward needs nothing behind it.

    torch ends a recomputation with the last tensor that the backward needs, here that product's input.
    """
    last = {
        layer[1]: name for name, _ in _weights(spec) if (layer := LAYER.match(name)) and style_of(name, plan) in ROWWISE
    }
    needed = {
        layer[1]
        for name in (parameter.name for parameter in spec.parameters)
        if (layer := LAYER.match(name)) and (NORM_BEHIND.search(name) or style_of(name, plan) in (EXPERTS, PACKED))
    }
    return {name for layer, name in last.items() if layer not in needed}


def _experts_inside(spec: ModelSpec, plan: Mapping[str, str]) -> dict[str, bool]:
    """Return the modules of which each rank has a part of every expert, and whether the backward needs what is computed behind."""
    names = [parameter.name for parameter in spec.parameters]
    modules = {name.rpartition(".")[0] for name in names if style_of(name, plan) == PACKED}
    return {each: any(name.startswith(each.replace("experts", "shared_expert")) for name in names) for each in modules}


def _expert_transfers(job: Job, spec: ModelSpec, rows: float) -> list[Transfer]:
    """Return what experts exchange; `rows`: bytes of the tokens before all of them, in all passes."""
    tp, ep, micro = job.parallelism.tp, job.parallelism.ep, job.train_config.accumulation
    if spec.moe is None or ep == 1:
        return []
    exchanged = 2 * (ep - 1) / ep * rows * spec.moe.active / tp * job.expert_imbalance
    return [
        Transfer(exchanged, micro, "nothing", "ep", "tokens, exchanged in the ep group"),
        Transfer((tp - 1) / tp * rows, micro, "nothing", "tp", "experts' outputs, all-gathered in the tp group"),
    ]


def _weights(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and whole shape of every matrix, a tied one under each of its names."""
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters}
    shapes |= {name: shapes[group[0]] for group in spec.tied for name in group[1:]}
    return ((name, shape) for name, shape in shapes.items() if len(shape) == 2)
