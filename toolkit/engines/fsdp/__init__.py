"""torch's FSDP2 (`fully_shard`): full shard, grad-op, and HSDP. Parameters are their own fp32 masters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from toolkit.config.strategy import Strategy
from toolkit.core.errors import StrategyError
from toolkit.engines.base import read_precision
from toolkit.engines.deferred import broadcast, defer
from toolkit.engines.fsdp.shard_filling import filling
from toolkit.engines.fsdp.simulation import FSDPForecast, shard_ranks
from toolkit.engines.job import Job
from toolkit.engines.optimizer_step import loss_scaler
from toolkit.engines.records import Prepared
from toolkit.engines.shards import Shard
from toolkit.engines.states import can_stream, policy_dtypes
from toolkit.engines.timeouts import handlers
from toolkit.engines.upstream import shard_with_fsdp, ties_kept
from toolkit.models.hf_loading import first_names

if TYPE_CHECKING:
    from datetime import timedelta

    import torch


class FSDP(FSDPForecast):
    """`fsdp`, `fsdp_grad_op` and `hsdp`."""

    needs_optimizer = True
    model_no_sync = False
    sync_each_batch = True  # without it FSDP holds whole gradients until the last micro-batch

    def settings(self, job: Job) -> dict[str, Any]:
        """Return wrap policy, dtypes and mesh. Refuse offload on a CPU, and a single rank without offload."""
        strategy, spec, device = job.strategy, job.spec, job.device
        if strategy.offload != "none" and device.kind == "cpu":
            raise StrategyError(
                f"sharding {strategy.sharding!r} cannot offload on CPU ranks: FSDP's offload needs an accelerator. "
                "Choose offload 'none', or sharding 'zero3'."
            )
        if job.parallelism.shard_size < 2 and strategy.offload == "none":
            raise StrategyError(
                f"sharding {strategy.sharding!r} needs at least 2 ranks to shard over; got 1. Choose 2 processes, or sharding "
                "'none' for one" + (", or offload 'cpu'." if device.kind == "cuda" else ".")
            )
        return {
            "reshard_after_forward": strategy.sharding != "fsdp_grad_op",
            "wrap": list(spec.blocks) if spec else [],
            "param_dtype": job.compute_dtype if job.precision.mixed else None,
            # Accelerate's own default reduces in the compute dtype.
            "reduce_dtype": job.precision.reduce if job.precision.mixed else None,
            "offload": strategy.offload == "cpu",
            "replicate": job.parallelism.dp_replicate,
            "shard": job.parallelism.shard_size,
            "apart": {},  # modules that other numbers of ranks shard
        }

    def accelerator_kwargs(self, job: Job, timeout: timedelta | None = None) -> dict[str, Any]:
        """Return a `FullyShardedDataParallelPlugin` of version 2, the mesh for HSDP, and the shim for CPU ranks."""
        from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
        from torch.distributed.fsdp import MixedPrecisionPolicy

        ours = job.settings
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=ours["reshard_after_forward"],
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=ours["wrap"] or None,
            mixed_precision_policy=MixedPrecisionPolicy(**policy_dtypes(job)),
            cpu_offload=ours["offload"],
            cpu_ram_efficient_loading=False,  # `filling` does it
            activation_checkpointing=False,
            state_dict_type="SHARDED_STATE_DICT",  # of `save_state`, which would gather model and moments on rank 0
        )
        kwargs: dict[str, Any] = {
            "fsdp_plugin": plugin,
            "mixed_precision": job.precision.accelerate if job.precision.mixed else "no",
            "kwargs_handlers": [*handlers(timeout), *loss_scaler(job)],
        }
        if ours["replicate"] > 1:
            kwargs["parallelism_config"] = ParallelismConfig(
                dp_replicate_size=ours["replicate"], dp_shard_size=ours["shard"]
            )
        if job.device.kind == "cpu":
            shard_with_fsdp(timeout)
        return kwargs

    def environment(self, job: Job) -> dict[str, str | None]:
        """Return the offload variable: only with it Accelerate adds gloo for tensors on the host (state.py:226).

        The last one would tell transformers to read on one rank of a node.
        """
        return {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_OFFLOAD_PARAMS": str(job.settings["offload"]).lower(),
            "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        }

    def to_yaml(self, strategy: Strategy, ranks: int, nodes: int) -> dict[str, Any]:
        """Return a file with `distributed_type: FSDP`, version 2. The worker fills in the model's wrapped classes."""
        config = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": strategy.offload == "cpu",
            "fsdp_reshard_after_forward": strategy.sharding != "fsdp_grad_op",
            # HF Trainer's `save_model` silently leaves no weights with any other.
            "fsdp_state_dict_type": "FULL_STATE_DICT",
        }
        content = super().to_yaml(strategy, ranks, nodes) | {"distributed_type": "FSDP", "fsdp_config": config}
        if strategy.dp_replicate > 1:
            content["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": strategy.dp_replicate,
                "parallelism_config_dp_shard_size": ranks // strategy.dp_replicate,
                "parallelism_config_tp_size": 1,
                "parallelism_config_cp_size": 1,
            }
        return content

    def from_env(self, environ: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the fields of `FSDP_*` and `PARALLELISM_CONFIG_*`.

        Raises:
            StrategyError: for FSDP1, which is deprecated and fails on a CPU.
        """
        if environ.get("ACCELERATE_USE_FSDP") != "true":
            return None
        if environ.get("FSDP_VERSION", "1") != "2":
            raise StrategyError("fsdp_version 1 is deprecated upstream and not supported. Write `fsdp_version: 2`.")
        replicate = int(environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))
        sharding = "fsdp" if environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true" else "fsdp_grad_op"
        groups = {"sharding": "hsdp", "dp_replicate": replicate} if replicate > 1 else {"sharding": sharding}
        offload = "cpu" if environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true" else "none"
        return {**groups, "offload": offload} | read_precision(environ)

    def compute_note(self, job: Job) -> str:
        """Return the note that the mixed-precision policy casts what an all-gather sends, group by group."""
        cast = job.settings["param_dtype"]
        return f"on copies that each all-gather makes in {cast}" if cast else "on the weights as they are gathered"

    def streams(self, job: Job) -> bool:
        """Return whether weights are read one at a time: all are, if possible."""
        return can_stream(job)

    def loading_note(self, job: Job, streamed: bool = False) -> str:
        """Return a note about the ranks that read the weights, whole or one at a time."""
        if streamed:
            packed = "; those that it packs it reads whole, one at a time" if job.strategy.quantized else ""
            return f"every rank reads its own part of each weight{packed}"
        if job.strategy.quantized:
            return "every rank reads and quantizes the whole model, and keeps its shard"
        return "rank 0 reads the whole model and broadcasts each shard; the others start empty"

    # A worker ---------------------------------------------------------------------------------------------------------

    def load_model(self, job: Job, reader: Any) -> Any:
        """Leave the weights in the files until `prepare`, if possible. Else rank 0 reads them, and every rank packed ones."""
        if self.streams(job) and (model := reader.defer()) is not None:
            return model
        return reader.read() if job.strategy.quantized else reader.read_on_main()

    def before_prepare(self, job: Job, model: torch.nn.Module) -> None:
        """Merge embeddings with one shared weight into one module: FSDP2 takes a weight in one group only.

        Accelerate puts the input and the output embedding into one group, but not the encoder's and the decoder's
        of a T5.
        """
        import torch

        first: dict[int, torch.nn.Module] = {}
        for name, module in list(model.named_modules()):
            if isinstance(module, torch.nn.Embedding):
                owner = first.setdefault(id(module.weight), module)
                if owner is not module:
                    model.set_submodule(name, owner)
        if not job.settings["wrap"]:
            model._no_split_modules = _blocks(model)  # type: ignore[assignment]

    def defer_values(self, job: Job, model: torch.nn.Module) -> None:
        """Defer the weights in the files, or rank 0's."""
        weights: Any = getattr(model, "streamed_weights", None)
        if weights is not None:
            weights.defer()
        elif not job.strategy.quantized:
            defer(model.named_parameters(), lambda _, parameter: broadcast(parameter))

    @contextmanager
    def preparing(self, job: Job, model: torch.nn.Module) -> Iterator[None]:
        """Give each parameter its shard: of rank 0's values, or of a weight that is still in the files.

        Raises:
            StrategyError: for a weight of two groups.
        """
        from torch.distributed.fsdp import FSDPModule

        blocks: Any = job.settings["wrap"] or model._no_split_modules
        _check_groups(model, lambda module: module if type(module).__name__ in blocks else None)
        with ties_kept(model), filling(job, model):
            yield
        _check_groups(model, lambda module: module._get_fsdp_state() if isinstance(module, FSDPModule) else None)

    def check(self, prepared: Prepared) -> list[str]:
        """Check for FSDP2 modules with every parameter a DTensor over the requested mesh."""
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        model: Any = prepared.model
        if not isinstance(model, FSDPModule):
            return [f"engine is {type(model).__name__}, expected an FSDPModule"]
        parameters = dict(prepared.model.named_parameters())
        whole = [name for name, parameter in parameters.items() if not isinstance(parameter, DTensor)]
        if whole:
            return [f"{len(whole)} parameters are not sharded, the first is {whole[0]}"]
        if wrong := _groups(prepared):
            return wrong
        ours = prepared.job.settings
        expected = (ours["replicate"], ours["shard"]) if ours["replicate"] > 1 else (ours["shard"],)
        apart = {name for name in parameters if shard_ranks(prepared.job, name) != ours["shard"]}
        for name in apart:
            if _data_parallel(parameters[name].device_mesh)[-1] != shard_ranks(prepared.job, name):
                return [f"{name} is not sharded over {shard_ranks(prepared.job, name)} ranks"]
        meshes = {_data_parallel(each.device_mesh) for name, each in parameters.items() if name not in apart}
        return [] if meshes == {expected} else [f"mesh is {sorted(meshes)}, expected {expected}"]

    def shards(self, prepared: Prepared, create: bool = False) -> Iterable[Shard]:
        """Yield this rank's box of each parameter and its moments, all of it, and the persistent buffers, whole."""
        from torch.distributed.fsdp import FSDPModule

        for module in prepared.model.modules():
            if isinstance(module, FSDPModule):
                # A forward without a backward leaves the last group whole, and then its parameters are no shards.
                module.reshard()
        yield from super().shards(prepared, create)


def _data_parallel(mesh: Any) -> tuple[int, ...]:
    """Return the sizes of a mesh without the dimensions of tensor and expert parallelism."""
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return tuple(size for size, name in zip(mesh.shape, names, strict=True) if name not in ("tp", "ep"))


def _groups(prepared: Prepared) -> list[str]:
    """Compare the parameter groups with the request, by torch's own fields (`_fsdp_param_group.py`)."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

    ours, plain = prepared.job.settings, not hasattr(prepared.accelerator, "job")
    expected = {} if plain else policy_dtypes(prepared.job)  # a plain Accelerator has dtypes of its own
    wrapped, wrong = set(), []
    for name, module in prepared.model.named_modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is None:
            continue
        wrapped.add(type(module).__name__.removeprefix("FSDP"))
        actual = {key: getattr(group.mp_policy, key) for key in expected}
        if actual != expected:
            wrong.append(f"{name or 'the root'} computes and reduces in {actual}, expected {expected}")
        if isinstance(group.offload_policy, CPUOffloadPolicy) != ours["offload"]:
            wrong.append(f"{name or 'the root'} has offload {not ours['offload']}, expected {ours['offload']}")
        block = type(module).__name__.removeprefix("FSDP") in ours["wrap"]
        if block and group._reshard_after_forward != ours["reshard_after_forward"]:
            wrong.append(f"{name} has reshard_after_forward {group._reshard_after_forward}")
    missing = sorted(set(ours["wrap"]) - wrapped)
    return [*wrong, *(f"{name} is not sharded as a group of its own" for name in missing)][:3]


def _check_groups(model: torch.nn.Module, group_of: Callable[[torch.nn.Module], Any]) -> None:
    """Check that modules with one weight are gathered together: torch refuses others in the first forward.

    Args:
        model: before or after it is sharded.
        group_of: returns the group that begins with a module, or None.

    Raises:
        StrategyError: for a weight of two groups.
    """
    groups = {name: group_of(module) for name, module in model.named_modules(remove_duplicate=False)}
    places: dict[str, tuple[str, Any]] = {}
    for name, first in first_names(model, buffers=False).items():
        owner = name.rpartition(".")[0]
        while owner and groups[owner] is None:
            owner = owner.rpartition(".")[0]
        other, group = places.setdefault(first, (name, groups[owner]))
        if group is not groups[owner]:
            raise StrategyError(
                f"{other} and {name} are one weight, and FSDP gathers the modules around them apart. "
                "Choose sharding 'zero3', or give each module a weight of its own."
            )


def _blocks(model: torch.nn.Module) -> list[str]:
    """Return the classes that a model declares as its blocks; Accelerate shards each of them without a spec.

    Without one around the input embedding (BERT's): Accelerate shards the embedding itself, and a weight is sharded once.
    """
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    class_names, blocks = set(getattr(model, "_no_split_modules", None) or ()), set()
    for module in model.modules():
        if type(module).__name__ in class_names and all(part is not embedding for part in module.modules()):
            blocks.add(type(module).__name__)
    return sorted(blocks)
