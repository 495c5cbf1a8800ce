"""Tensor and expert parallelism (`--tp`, `--ep`) around another engine, which shards over data-parallel ranks or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.config.strategy import Strategy
from toolkit.core.errors import StrategyError
from toolkit.core.units import BYTES_OF
from toolkit.engines.base import Engine
from toolkit.engines.job import Job
from toolkit.engines.mesh.plan import (
    EXPERTS,
    SHARED,
    experts_apart,
    is_even,
    local_job,
    plan_of,
    split_dimension,
    style_of,
    transfers,
)
from toolkit.engines.mesh.refusals import refuse
from toolkit.engines.mesh.styles import group_heads, planned, register_shared, register_summed, share_inputs
from toolkit.engines.optimizer_step import average_gradients
from toolkit.engines.records import Prepared, StateMemory, Transfer
from toolkit.engines.simulation import Simulation
from toolkit.engines.states import parameters_of, policy_dtypes, trained_elements
from toolkit.engines.traces import Trace, TraceConfig
from toolkit.engines.upstream import patched
from toolkit.models import generic_name

if TYPE_CHECKING:
    from datetime import timedelta

    import torch


class Mesh(Engine):
    """`--tp N`, `--ep N` with `none`, `ddp`, `fsdp`, `fsdp_grad_op` and `hsdp`: transformers' plans over N ranks.

    The inner engine answers for the local job: without this parallelism, with this rank's shapes (`local_job`). It is an object
    and no base class, since its own calls have to see the local job alone. What it changes in `Engine` holds here too, unless this
    class has its own: `__init__` copies those attributes, so that an engine that changes another one is not forgotten.
    """

    broadcasts_buffers = False
    needs_every_gradient = False
    after_prepare, after_restore = Engine.after_prepare, Engine.after_restore  # no model is wrapped in DDP

    def __init__(self, inner: Engine, *, sharded: bool) -> None:
        """Go around `inner`. `sharded`: it shards; otherwise every data-parallel rank has the same."""
        self.inner, self.sharded = inner, sharded
        self._replicas: Any = None
        """The process group of the ranks under `ddp` that hold the same part of the model that was read last."""
        for name in set(dir(Engine)) - vars(Mesh).keys():
            if not name.startswith("_") and getattr(type(inner), name) is not getattr(Engine, name):
                setattr(self, name, getattr(inner, name))
        self.wraps_model = self.sharded

    # Configuration ----------------------------------------------------------------------------------------------------

    def settings(self, job: Job) -> dict[str, Any]:
        """Return the groups' sizes, the plan, and the inner engine's settings with the experts' own groups."""
        refuse(job)
        sizes = job.parallelism
        plan = plan_of(job.spec, sizes) if job.spec is not None else {}
        inner = self.inner.settings(local_job(job))
        return {"tp": sizes.tp, "ep": sizes.ep, "plan": plan, **inner, "apart": experts_apart(job)}

    def accelerator_kwargs(self, job: Job, timeout: timedelta | None = None) -> dict[str, Any]:
        """Return the inner engine's, without arguments that would shard or read the model again."""
        kwargs = self.inner.accelerator_kwargs(local_job(job), timeout)
        kwargs.pop("parallelism_config", None)
        if self.sharded:
            kwargs["fsdp_plugin"].auto_wrap_policy = None
            kwargs["fsdp_plugin"].transformer_cls_names_to_wrap = None
        return kwargs

    def environment(self, job: Job) -> dict[str, str | None]:
        """Return the inner engine's."""
        return self.inner.environment(local_job(job))

    def to_yaml(self, strategy: Strategy, ranks: int, nodes: int) -> dict[str, Any]:
        """Return the inner engine's for several ranks. Accelerate's own tensor parallelism is not used."""
        sharding = strategy.sharding if self.sharded else "ddp"
        plain = dataclasses.replace(strategy, tp=1, ep=1, sharding=sharding)
        content = self.inner.to_yaml(plain, ranks, nodes)
        content.pop("parallelism_config", None)
        if self.sharded:
            content["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] = False
        return content

    def from_env(self, environ: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the inner engine's. The launcher knows no groups: `none` looks like `ddp`, and `hsdp` like `fsdp`."""
        fields = self.inner.from_env(environ)
        if fields is None:
            return None
        left = {name: value for name, value in fields.items() if name not in ("sharding", "dp_replicate")}
        return left

    # Forecast ---------------------------------------------------------------------------------------------------------

    def simulated_ranks(self, job: Job) -> Sequence[int]:
        """Return the first rank of a group, and the last if the group cannot divide a dimension evenly."""
        assert job.spec is not None
        sizes = job.parallelism
        return (0,) if is_even(job.spec, sizes) else (0, sizes.tp - 1)

    def expected_state(self, job: Job, rank: int = 0) -> StateMemory:
        """Return the inner engine's over local shapes."""
        return self.inner.expected_state(local_job(job, rank), 0)

    def is_boundary(self, trace: Trace, what: str, name: str) -> bool:
        """Return the inner engine's answer; experts, too, are gathered apart."""
        return name.endswith(".experts") or self.inner.is_boundary(trace, what, name)

    def trace_config(self, job: Job, *, masked: bool, rank: int = 0) -> TraceConfig:
        """Return the inner engine's for one rank of a group."""
        config, sizes = self.inner.trace_config(job, masked=masked), job.parallelism
        return dataclasses.replace(config, tp=sizes.tp, ep=sizes.ep, tp_rank=job.coordinates(rank).tp)

    def simulate_load(self, simulation: Simulation) -> None:
        """Simulate loading: each rank reads its slices directly to its device. Under an adapter FSDP shards them later."""
        ledger, kept = simulation.ledger, simulation.state.parameters
        ledger.enter("load")
        if self._shards_later(simulation.job):
            split = sum(state.bytes for state in parameters_of(local_job(simulation.job, simulation.rank)))
            ledger.hold("parameters", split)
            ledger.hold("parameters", kept - split)
        else:
            ledger.hold("parameters", kept)
        ledger.enter("prepare")

    def simulate_training(self, simulation: Simulation) -> None:
        """Simulate the inner engine over local shapes."""
        local = local_job(simulation.job, simulation.rank)
        self.inner.simulate_training(dataclasses.replace(simulation, job=local, rank=0))

    def communication(self, job: Job) -> list[Transfer]:
        """Return the inner engine's over local shapes, and those of the tensor- and expert-parallel groups."""
        local, ranks = local_job(job), job.parallelism.loss_size
        inner = self.inner.communication(local)
        if not self.sharded and ranks > 1:
            size = 2 * (ranks - 1) / ranks * trained_elements(local) * BYTES_OF[job.weight_dtype]
            inner = [Transfer(size, 1, "nothing", "replicas", "gradients, all-reduced")]
        return [*inner, *transfers(job, self.autocast_dtype(job))]

    def compute_note(self, job: Job) -> str:
        """Return the inner engine's."""
        what = {"matrix products": job.parallelism.tp, "experts": job.parallelism.ep}
        notes = [f"{name} over {ranks} ranks" for name, ranks in what.items() if ranks > 1]
        return "; ".join([self.inner.compute_note(local_job(job)), *notes])

    def streams(self, job: Job) -> bool:
        """Return false: each rank reads slices."""
        return False

    def loading_note(self, job: Job, streamed: bool = False) -> str:
        """Return the note that each rank reads its own slices."""
        return "every rank reads its own part of each weight"

    # A worker ---------------------------------------------------------------------------------------------------------

    def load_model(self, job: Job, reader: Any) -> Any:
        """Read this rank's part of every weight; `reader` is a `weight_reader.Reader`.

        transformers applies both plans and FSDP2 on the meta device, then reads only the slices of this rank. An adapter comes
        between the two, so with one `before_prepare` applies FSDP2.
        """
        from transformers.distributed import DistributedConfig, mixin

        assert job.spec is not None
        register_summed()
        sizes, later = job.parallelism, self._shards_later(job)
        # Ranks of one sequence hold the same part, or a shard each, like those of other rows.
        shards, copies = (sizes.shard_size, sizes.dp_replicate) if self.sharded else (1, sizes.loss_size)
        dense = {"tp_size": sizes.tp, "fsdp_size": shards, "dp_replicate_size": copies}
        shared = register_shared(job.spec, sizes)
        config = DistributedConfig(**dense, ep_size=sizes.ep, tp_plan=shared or None)
        shard = partial(_fully_shard, job) if self.sharded and not later else lambda model, *_: model
        with patched(mixin, apply_fully_sharded_data_parallelism=shard), planned(job.spec):
            model = reader.read(distributed_config=config)
        mesh = model._mesh_manager
        self._replicas = None if self.sharded or copies == 1 else mesh.get_mesh("dp_replicate").get_group()
        if shared:
            group_heads(model, job.spec, sizes)
        if sizes.tp > 1:
            share_inputs(model, job.spec, sizes, mesh.get_mesh("tp"))
        # Saving would gather the model once more, which the export has done.
        model.config.distributed_config = None
        return model

    def _shards_later(self, job: Job) -> bool:
        """Return whether FSDP2 is applied to weights that have been read: an adapter has to be there."""
        return self.sharded and job.strategy.adapter != "none"

    def before_prepare(self, job: Job, model: torch.nn.Module) -> None:
        """Apply FSDP2 where it waits for an adapter. Refuse a model that `toolkit.load` has not split.

        Raises:
            StrategyError: for a whole model.
        """
        from torch.distributed.fsdp import FSDPModule

        if getattr(model, "_tp_size", None) != job.parallelism.tp or job.spec is None:
            raise StrategyError(
                f"prepare got a {type(model).__name__} that is not split for {job.strategy.label}: weights are split while "
                "they are read. Make the Accelerator with `toolkit.describe(model)`, and the model with `toolkit.load`. "
                "A tp_plan of your own goes to `describe`."
            )
        _check_plan(job, model)
        if self._shards_later(job) and not isinstance(model, FSDPModule):
            _fully_shard(job, model, model._mesh_manager)

    def check(self, prepared: Prepared) -> list[str]:
        """Check the inner engine, and that each planned parameter is split over its group."""
        from torch.distributed.tensor import DTensor

        job = prepared.job
        wrong = self.inner.check(dataclasses.replace(prepared, job=local_job(job)))
        plan, sizes = job.settings["plan"], job.parallelism
        parameters = prepared.accelerator.unwrap_model(prepared.model).named_parameters()
        named = {name.removeprefix("base_model.model."): parameter for name, parameter in parameters}
        for parameter in parameters_of(job):
            tensor = named.get(parameter.name)
            group = "ep" if style_of(parameter.name, plan) == EXPERTS else "tp"
            ranks = parts_of(tensor, group) if isinstance(tensor, DTensor) else 1
            expected = 1 if split_dimension(parameter, plan) is None else getattr(sizes, group)
            if tensor is not None and ranks != expected:
                wrong.append(f"{parameter.name} is split over {ranks} {group} ranks, expected {expected}")
        return wrong[:3]

    def clip(self, parameters: Sequence[torch.Tensor], limit: float) -> torch.Tensor:
        """Clip by the norm over all meshes. A tensor that lies whole on every tp rank counts once. Under `ddp` average before."""
        if self._replicas is not None:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            average_gradients(gradients, self._replicas)
        return super().clip(parameters, limit)

    def split(self, job: Job, model: Any, mesh: Any, names: Collection[str]) -> None:
        """Split the parameters of these names over a `tp` mesh before they are read: those of a pipeline's stage."""
        from transformers.distributed import DistributedConfig
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        assert job.spec is not None
        register_summed()
        shared = register_shared(job.spec, job.parallelism)
        with planned(job.spec):
            plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size(), tp_plan=shared or None))
        modules = dict(model.named_modules())

        def is_held(name: str) -> bool:
            if name not in modules:
                return name in names
            return all(f"{name}.{leaf}" in names for leaf, _ in modules[name].named_parameters(recurse=False))

        apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if is_held(name)})
        if shared:
            group_heads(model, job.spec, job.parallelism)
        share_inputs(model, job.spec, job.parallelism, mesh)


def _check_plan(job: Job, model: Any) -> None:
    """Refuse a model that got another plan after it was split."""
    shared = {name: style for name, style in job.settings["plan"].items() if style == SHARED}
    used = {**job.spec.tp_plan, **shared} if job.spec is not None else {}
    given: dict[str, str] = model.tp_plan
    for name in [*used, *given] if job.parallelism.tp > 1 else ():
        if used.get(name) != given.get(name):
            raise StrategyError(
                f"prepare got a model with {given.get(name)!r} for {name!r} in its tp_plan, and it was split with "
                f"{used.get(name)!r}. Give the plan before weights are read: `toolkit.describe(model, tp_plan=...)`."
            )


def parts_of(tensor: Any, group: str) -> int:
    """Return over how many ranks of a `tp` or `ep` group a DTensor is split; 1 where each holds it whole."""
    names = tensor.device_mesh.mesh_dim_names or ()
    place = names.index(group) if group in names else None
    return tensor.device_mesh.size(place) if place is not None and not tensor.placements[place].is_replicate() else 1


def _fully_shard(job: Job, model: Any, mesh_manager: Any, *_: Any) -> Any:
    """Shard a model in the groups of accelerate's `fsdp2_prepare_model` (utils/fsdp_utils.py), not by transformers' plans."""
    from accelerate.utils.fsdp_utils import _find_final_norm
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    replicas = ("dp_replicate",) if job.parallelism.dp_replicate > 1 else ()
    policy = MixedPrecisionPolicy(**policy_dtypes(job))
    options = {"mesh": mesh_manager.get_mesh((*replicas, "fsdp")), "mp_policy": policy}
    reshard = job.settings["reshard_after_forward"]
    if job.parallelism.ep > 1:
        _shard_experts(job, model, {**options, "mesh": mesh_manager.get_mesh((*replicas, "efsdp"))})
    for module in [child for child in model.modules() if type(child).__name__ in job.settings["wrap"]][::-1]:
        fully_shard(module, reshard_after_forward=reshard, **options)
    embedding, head, norm = model.get_input_embeddings(), model.get_output_embeddings(), _find_final_norm(model)
    if tied := bool(model.all_tied_weights_keys):
        if embedding.weight.is_meta:
            model.tie_weights(recompute_mapping=False)
    else:
        fully_shard(embedding, reshard_after_forward=reshard, **options)
    tail = [module for module in ((norm, embedding, head) if tied else (norm, head)) if module is not None]
    fully_shard(tail, reshard_after_forward=False, **options)
    fully_shard(model, **options)
    return model


def _shard_experts(job: Job, model: Any, options: Mapping[str, Any]) -> None:
    """Shard experts over the ranks that hold the same ones, as transformers' `apply_fully_sharded_data_parallelism`.

    Tokens of all data-parallel ranks reach an expert: its gradient is a sum over more ranks than shard it. A factor other than
    the group's size is no kernel of gloo's, so FSDP2 sums there and divides itself.
    """
    from torch.distributed.fsdp import fully_shard

    # A policy of their own would round the router's weights, which come in fp32, to the compute dtype.
    options = {**options, "mp_policy": dataclasses.replace(options["mp_policy"], cast_forward_inputs=False)}
    for name, module in list(model.named_modules()):
        if generic_name(name) in job.settings["apart"]:
            experts = fully_shard(module, reshard_after_forward=job.settings["reshard_after_forward"], **options)
            experts.set_gradient_divide_factor(float(job.parallelism.loss_size))
            if options["mesh"].size(-1) > 1:
                experts.set_force_sum_reduction_for_comms(True)
