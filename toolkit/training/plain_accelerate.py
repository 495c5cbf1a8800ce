"""Code that makes its own `accelerate.Accelerator` (transformers' Trainer, TRL): distributed as it was launched, and audited."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import StrategyError
from toolkit.devices.machine import hardware
from toolkit.engines import upstream
from toolkit.engines.deepspeed.state import free_builds
from toolkit.engines.job import Job
from toolkit.engines.records import Prepared
from toolkit.engines.resolution import resolve
from toolkit.engines.timeouts import pg_timeout
from toolkit.run_folder.run_json import read_run_json
from toolkit.run_folder.run_lock import RUN_DIR
from toolkit.training.model_checks import check_requested
from toolkit.training.preparation import Audit, models_and_optimizers
from toolkit.training.preparation import audit as audit_prepared
from toolkit.training.run_log import count_steps, log
from toolkit.training.setup import TIMEOUT, agree, launched

TRAINER_FIGURES = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr", "eval_loss": "eval_loss"}
"""Trainer's names of what a run shows → the toolkit's."""


def audit(model: Any, optimizer: Any) -> Audit:
    """Compare a prepared model and its optimizer with the request of the launch: engine, ranks, stage or mesh, offload.

    Call it on every rank, behind `prepare`; behind the first step it measures the moments, too.

    Args:
        model: as `accelerator.prepare` returned it; of a Trainer `trainer.model_wrapped`.
        optimizer: as `accelerator.prepare` returned it; of a Trainer `trainer.optimizer`.

    Raises:
        StrategyMismatch: where something else was prepared than the launch requested.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import extract_model_from_parallel

    for owner in AcceleratorState._shared_state.get("owners", ()):
        if model in owner.prepared:
            return audit_prepared(Prepared(owner.job, model, optimizer, owner))
    state = PartialState()
    accelerator: Any = SimpleNamespace(
        unwrap_model=extract_model_from_parallel, process_index=state.process_index, num_processes=state.num_processes
    )
    return audit_prepared(Prepared(_launched_job(model), model, optimizer, accelerator))


def _launched_job(model: Any) -> Job:
    """Return the job of the launch. Precision, adapter and clipping are the script's own."""
    ranks, device = int(os.environ.get("WORLD_SIZE", "1")), hardware().device
    requested = agree(None, os.environ)
    check_requested(requested, model)
    strategy = replace(requested, precision="fp32", adapter="none", attention="auto")
    clipping = model.gradient_clipping() if hasattr(model, "gradient_clipping") else 0.0
    return resolve(strategy, TrainConfig(max_grad_norm=clipping), None, ranks, device)


class AuditCallback:
    """A `TrainerCallback` of transformers: audits a Trainer in `prepare` and behind its first step, and logs its figures.

    `Trainer(..., callbacks=[tk.AuditCallback()])`; under `toolkit launch` every Trainer has it.
    """

    def __init__(self) -> None:
        """Audit every `accelerate.Accelerator` of this process from now on."""
        import accelerate.accelerator

        _audit_every_prepare(accelerate.accelerator)

    _logged: Any = None
    """Trainer's figures that were shown last."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Audit what the first step has made."""
        if state.global_step == 1 and len(_prepared) == 2:
            audit(**_prepared)
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> Any:
        """Show Trainer's figures in the run's view and report."""
        figures = {TRAINER_FIGURES[name]: value for name, value in (logs or {}).items() if name in TRAINER_FIGURES}
        if figures and logs is not self._logged:  # a script may have added a second callback
            AuditCallback._logged = logs
            log(state.global_step, steps=state.max_steps, **figures)
        return control

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return an event that changes nothing."""
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda args, state, control, **_: control


_prepared: dict[str, Any] = {}
"""The model and the optimizer that a plain Accelerator prepared last."""


def on_launch() -> None:
    """Prepare a launched rank for a script. Nothing is imported now: the script may set variables first."""
    if launched(os.environ):
        sys.meta_path.insert(0, _OnImport())


class _OnImport(MetaPathFinder):
    """Changes libraries right after a script has imported them."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        change = CHANGES.pop(name, None)
        spec = importlib.util.find_spec(name) if change else None
        if change and spec:
            loader: Any = spec.loader
            execute = loader.exec_module
            loader.exec_module = lambda module: (execute(module), change(module))
        return spec


def _follow_trainer(module: Any) -> None:
    """Audit each Trainer, and let `toolkit resume` go on from the last checkpoint that the run itself has written."""
    module.DEFAULT_CALLBACKS.append(AuditCallback)
    upstream_train = module.Trainer.train

    @functools.wraps(upstream_train)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        if resume_from_checkpoint is None and (path := os.environ.get(RUN_DIR)):
            attempts = read_run_json(Path(path)).get("attempts", ())
            started = datetime.fromisoformat(attempts[0]["started"]).timestamp() if len(attempts) > 1 else math.inf
            # `trainer_state.json` is written last: a folder without it is one that a kill has cut off.
            states = Path(self.args.output_dir).glob("checkpoint-*/trainer_state.json")
            times = {path: path.stat().st_mtime for path in states if path.stat().st_mtime >= started}
            if times:
                resume_from_checkpoint = str(max(times, key=lambda path: times[path]).parent)
                print(f"resume: the Trainer goes on from {resume_from_checkpoint}", file=sys.stderr)
        return upstream_train(self, resume_from_checkpoint, *args, **options)

    module.Trainer.train = train


def _distribute(module: Any) -> None:
    """Let Accelerate distribute over CPU ranks, with the limit of `toolkit launch --timeout`, and audit what it prepares.

    Without `cpu=True` it takes each CPU rank for a run of its own, and with it ignores plugins (accelerate 1.15, state.py).
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    _audit_every_prepare(module)
    _check_clipping(module.Accelerator)
    limit = os.environ.get(TIMEOUT)  # `tk.accelerator` has read it, or was given another
    on_cpu = hardware().device.kind == "cpu" and int(os.environ.get("WORLD_SIZE", "1")) > 1
    use = {"ACCELERATE_USE_FSDP": DistributedType.MULTI_GPU, "ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED}
    kind = next((kind for name, kind in use.items() if on_cpu and os.environ.get(name) == "true"), None)
    if on_cpu and os.environ.get("LOCAL_RANK") == "0":
        free_builds()
    partial_init, full_init = PartialState.__init__, AcceleratorState.__init__

    @functools.wraps(partial_init)
    def on_gloo(self: Any, cpu: bool = False, **options: Any) -> None:
        plain, first = not upstream.made_by_toolkit, not PartialState._shared_state
        if plain and limit is not None:
            options["timeout"] = pg_timeout(float(limit))
        partial_init(self, cpu or (plain and on_cpu), **options)
        if plain and first and kind is not None:
            PartialState._shared_state["distributed_type"] = kind

    @functools.wraps(full_init)
    def with_plugins(self: Any, mixed_precision: Any = None, cpu: bool = False, *args: Any, **options: Any) -> None:
        full_init(self, mixed_precision, cpu and (upstream.made_by_toolkit or not on_cpu), *args, **options)

    PartialState.__init__, AcceleratorState.__init__ = on_gloo, with_plugins


def _audit_every_prepare(module: Any) -> None:
    """Audit where Accelerate has prepared a model and its optimizer."""
    original = module.Accelerator.prepare
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def prepare(self: Any, *objects: Any, **options: Any) -> Any:
        result = original(self, *objects, **options)
        found: Any = zip(("model", "optimizer"), models_and_optimizers(result), strict=True)
        new = {name: items[-1] for name, items in found if items and not hasattr(self, "job")}
        if "optimizer" in new and self._optimizers == [new["optimizer"]]:
            count_steps(new["optimizer"])
        _prepared.update(new)
        if new and len(_prepared) == 2:
            audit(**_prepared)
        return result

    module.Accelerator.prepare = prepare


def _check_clipping(kind: Any) -> None:
    """Refuse a loop that clips otherwise than DeepSpeed, which steps in `backward`, before the loop's call."""
    clip, backward = kind.clip_grad_norm_, kind.backward
    unclipped: set[int] = set()
    """Accelerators of which the loop has not clipped since the last step."""

    def check(accelerator: Any, norm: float) -> None:
        wrapper = getattr(accelerator, "deepspeed_engine_wrapped", None)
        limit = norm if wrapper is None or hasattr(accelerator, "job") else wrapper.engine.gradient_clipping()
        if norm not in (limit, limit or math.inf):
            raise StrategyError(
                f"this loop clips the gradient norm at {norm:g}, and DeepSpeed at {limit:g}, in accelerator.backward. Start it "
                f"with ACCELERATE_GRADIENT_CLIPPING={norm:g}, or write "
                f"tk.accelerator(train_config=tk.TrainConfig(max_grad_norm={norm:g}))."
            )

    @functools.wraps(clip)
    def clip_grad_norm_(self: Any, parameters: Any, max_norm: float, *args: Any, **options: Any) -> Any:
        unclipped.discard(id(self))
        check(self, float(max_norm))
        return clip(self, parameters, max_norm, *args, **options)

    @functools.wraps(backward)
    def checked_backward(self: Any, *args: Any, **options: Any) -> Any:
        if id(self) in unclipped:
            check(self, 0.0)
        if self.sync_gradients:
            unclipped.add(id(self))
        return backward(self, *args, **options)

    kind.clip_grad_norm_, kind.backward = clip_grad_norm_, checked_backward


CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "accelerate.accelerator": _distribute,
    "transformers.trainer": _follow_trainer,
}
"""Module → what is done once, right after a script has imported it."""
