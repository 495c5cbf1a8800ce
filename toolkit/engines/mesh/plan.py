"""Tensor- and expert-parallel plans by arithmetic: the shapes on a rank, and the transfers. Standard library only."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.config.parallelism import Parallelism
from toolkit.core.units import BYTES_OF, ceil_div
from toolkit.engines.job import Job
from toolkit.engines.records import Transfer
from toolkit.engines.states import State, adapted
from toolkit.models import ModelSpec, Parameter, generic_name

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
NORM_BEHIND = re.compile(r"\.post_(feedforward|mlp|ff)\w*norm")
"""A layer, and a norm of what its last part gives."""
BEHIND_EXPERTS = re.compile(rf"{NORM_BEHIND.pattern}|\.(shared_expert|shared_mlp|mixer\.shared_experts)\.")
"""That, and a shared expert that is computed or weighted after the others; an MLP's `shared_experts` are computed before."""


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
    if style == EXPERTS:
        return 0
    if style in (*COLWISE, PACKED):  # of fused experts the second: the first is the expert
        return max(0, len(parameter.shape) - 2)
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
            part_of, leaf = name.rsplit(".", 2)[:2]
            taken[f"{part_of}.{leaf}" if leaf.endswith("_b_proj") else part_of, shape[1]] = tokens * shape[1] * widest
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
    layers = {layer[1] for name in names if BEHIND_EXPERTS.search(name) and (layer := LAYER.match(name))}
    modules = {name.rpartition(".")[0] for name in names}
    return {
        each: (layer := LAYER.match(each)) is not None and layer[1] in layers
        for each in modules
        if plan.get(generic_name(each)) == INSIDE
    }


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
