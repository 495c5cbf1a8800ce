"""`RankRun`: the work of one rank around its training steps: folder, checkpoints, evaluation, measurement, export."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from toolkit import measurement
from toolkit.checkpoints import (
    CheckpointWriter,
    ResumePoint,
    check_fits,
    find_resume_point,
    identify,
    newest_step,
    quarantine,
    restore,
)
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.atomic_io import read_events, write_json
from toolkit.core.errors import StrategyMismatch, is_out_of_memory
from toolkit.core.phases import phase
from toolkit.core.stopping import StopSignal
from toolkit.data import eval_batches, spell_samples
from toolkit.devices.machine import hardware
from toolkit.engines.job import Job
from toolkit.engines.played import measured
from toolkit.engines.rank_calls import on_any_rank
from toolkit.engines.records import Prepared, on_device
from toolkit.engines.timeouts import limit_all, pg_timeout
from toolkit.exporters import format_versions, save, try_save, verify
from toolkit.exporters.generation import SAMPLE_TOKENS, answer, encode
from toolkit.forecasting.stages import schedule_record
from toolkit.measurement.window import MEASURED_STEPS
from toolkit.run_folder.folder import Folder
from toolkit.run_folder.heartbeat import Beat
from toolkit.run_folder.run_json import read_run_json
from toolkit.run_folder.run_lock import supervised
from toolkit.training.checkpoint_policy import CheckpointPolicy, is_due
from toolkit.training.metrics import StepLog, evaluate
from toolkit.training.preflight import PREPARED, run_preflight, versions, with_forecast
from toolkit.training.preparation import Audit, audit
from toolkit.training.replicas import wrong_parts
from toolkit.training.resumption import (
    check_not_repeated,
    commit_attempt,
    describe_run,
    finish,
    record_attempt,
    resume_hint,
)
from toolkit.training.setup import accelerator, seed_everything

if TYPE_CHECKING:
    from accelerate import Accelerator

    from toolkit.training.loop import Step

LOADING_TIMEOUT = 24 * 3600.0
"""Seconds that collectives may take until the model is ready: ranks read at different speeds. Then `--timeout` holds."""


class RankRun:
    """One rank's run. Its methods are called in the order in which they stand here."""

    def __init__(
        self,
        folder: Folder,
        beat: Beat,
        run_config: RunConfig,
        train_config: TrainConfig,
        strategy: Strategy,
        *,
        resume: bool = False,
    ) -> None:
        """Start the memory measurement of this process.

        Args:
            folder: of the run, entered by this process.
            beat: this rank's heartbeat.
            run_config, train_config, strategy: the request.
            resume: continue from the folder's newest checkpoint.
        """
        self.folder, self.beat, self.config, self.resume = folder, beat, run_config, resume
        self._train_config, self._strategy = train_config, strategy
        self.machine = hardware()
        self.window = measurement.start(self.machine.device.kind, run_config.memory_window)
        self.stop = StopSignal()
        self.resume_point = ResumePoint.nothing()
        self.attempt = 0
        self._audit: Audit | None = None
        self._ended_early, self._last_step = False, 0

    @property
    def start(self) -> int:
        """The last step that an earlier attempt has done; 0 for a new run."""
        return self.resume_point.step

    @property
    def job(self) -> Job:
        """The resolved request."""
        return self.preflight.job

    # Before the model is loaded -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Describe the model, open the data, forecast the run. Before an engine is set up: ZeRO-3 partitions every later model.

        Raises:
            ToolkitError: for a request that cannot run.
        """
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        prepared = os.environ.pop(PREPARED, None)
        self.preflight = run_preflight(
            self.config, self._strategy, self._train_config, ranks, self.machine.device, prepared=prepared
        )
        steps = self.preflight.job.train_config.steps
        self._train_config = dataclasses.replace(self._train_config, steps=steps, epochs=None)
        if os.environ.get("RANK", "0") == "0":
            start = newest_step(self.folder.checkpoints) if self.resume else 0
            self.preflight = with_forecast(self.preflight, self.config, self.machine, start)

    def make_accelerator(self) -> Accelerator:
        """Make the run's Accelerator, seed this rank, and print the headline of the run."""
        self.accelerator = accelerator(
            self._strategy,
            self._train_config,
            self.preflight.spec,
            log_with=self.config.tracker,
            project_dir=str(self.folder.path),
            timeout=max(self.config.timeout, LOADING_TIMEOUT),
        )
        self.accelerator.own_loop = False
        seed_everything(self.accelerator)
        self.rank = self.accelerator.process_index
        self.beat.stage = self.job.coordinates(self.rank).pp if self.job.parallelism.pp > 1 else None
        self.accelerator.print("\n".join((_headline(self.job), *self.preflight.notes)))
        return self.accelerator

    def find_start(self) -> None:
        """Find the checkpoint from which the run continues, and record the attempt in `run.json`. A collective.

        Raises:
            CheckpointError: for a checkpoint of another model, adapter or data.
            RunError: for a finished run without a checkpoint.
        """
        if self.resume:
            self.resume_point = find_resume_point(self.accelerator, self.folder.checkpoints)
        with self.accelerator.local_main_process_first():  # the other ranks find the weights' hashes in the cache
            rows = self.preflight.rows
            self.identity = identify(self.preflight.spec, self.job.strategy, rows.fingerprint)
        check_fits(self.resume_point, self.job, self.identity)
        quarantine(self.accelerator, self.resume_point)
        if self.resume:
            self.accelerator.print(str(self.resume_point))
            check_not_repeated(self.folder.path, read_run_json(self.folder.path), self.start)
        self._description = describe_run(self.preflight, self.config, self.machine)
        self.attempt = record_attempt(self.accelerator, self.folder, self._description, self.start)

    def batches(self) -> Any:
        """Return this rank's micro-batches after the last done step."""
        return self.preflight.batches(self.rank, start=self.start, workers=self.config.workers)

    def restore(self, prepared: Prepared, schedule: Any) -> None:
        """Try to save, then restore the checkpoint's states. From here on a collective fails after `--timeout`."""
        if self.config.save:
            try_save(prepared, self.preflight.tokenizer, self.folder.export)
        if self.resume_point.manifest is not None:
            restore(prepared, schedule, self.resume_point, self.identity)
        limit_all(pg_timeout(self.config.timeout))
        if self.accelerator.is_main_process:
            changes = commit_attempt(self.folder, self._description, self.start)
            if changes:
                self.accelerator.print(f"changed since the last attempt: {', '.join(changes)}")
        if self.config.tracker:
            self.accelerator.init_trackers("accelerate-toolkit", config={"sharding": self.job.strategy.sharding})

    # The training steps -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM stop the run after its current step. Open the progress bar."""
        self.beat.note("between", step=self.start)
        self._log = StepLog(
            self.folder,
            self.job,
            self.preflight.sample_ids,
            attempt=self.attempt,
            start=self.start,
            main=self.rank == 0,
        )
        with self.stop, self.beat.listening():
            yield

    def stop_received(self) -> bool:
        """Return whether a signal has reached this rank."""
        return self.stop.number is not None

    def checkpoint_policy(self, prepared: Prepared, schedule: Any) -> CheckpointPolicy:
        """Return the policy that decides after each step whether a checkpoint is due."""
        config, writer = self.config, None
        if config.checkpoints:
            place = self.folder.checkpoints, self.identity
            writer = CheckpointWriter(
                prepared, schedule, *place, versions=versions(), keep=config.keep, patience=config.timeout
            )
        return self.policy_of(writer)

    def policy_of(self, writer: CheckpointWriter | None) -> CheckpointPolicy:
        """Return the policy around a writer."""
        return CheckpointPolicy(
            writer,
            self.job,
            self.config,
            self.folder.published,
            attempt=self.attempt,
            beat=self.beat,
            window=self.window,
            stop_received=self.stop_received,
        )

    def evaluation_due(self, step: int) -> bool:
        """Return whether the run evaluates after this step."""
        return self.preflight.eval_rows is not None and is_due(
            step, self.config.eval_every, self.job.train_config.total_steps
        )

    def missed_evaluation(self) -> bool:
        """Return whether an earlier attempt was stopped between its last step and the evaluation. A collective."""
        if not self.start or not self.evaluation_due(self.start):
            return False
        lines = (line for line in read_events(self.folder.events) if "eval_loss" in line)
        return not on_any_rank(any(line["step"] == self.start for line in lines))

    def _eval_losses(self) -> list[float]:
        """Return the losses of all evaluations so far, infinite where one was not finite. Rank 0 has them."""
        events = read_events(self.folder.events) if self.accelerator.is_main_process else []
        losses = (line["eval_loss"] for line in events if "eval_loss" in line)
        return [math.inf if loss is None else loss for loss in losses]

    def ends_early(self) -> bool:
        """Return whether the last `early_stop` evaluations had no lower loss. A collective."""
        if not self.config.early_stop or not self.preflight.eval_rows:
            return False
        losses = self._eval_losses()
        late = bool(losses) and len(losses) - 1 - losses.index(min(losses)) >= self.config.early_stop
        self._ended_early = on_any_rank(late)
        if self._ended_early:
            self.accelerator.print(f"the run ends: {self.config.early_stop} evaluations in a row had no lower loss")
        return self._ended_early

    def evaluate(self, prepared: Prepared, step: int, tokenizer: Any = None) -> bool:
        """Record the mean loss over all held-out rows; save the best model. A collective.

        Returns:
            False where a signal interrupted it.
        """
        assert self.preflight.eval_rows is not None, "nothing is due without data"
        self.beat.note("evaluate")
        batches = eval_batches(
            self.preflight.eval_rows,
            micro_batch=self.config.eval_micro_batch or self.job.train_config.micro_batch,
            dp_rank=self.job.coordinates(self.rank).dp_rank,
            dp_size=self.job.parallelism.dp_size,
            attention=self.job.strategy.attention,
        )
        loss = evaluate(prepared, batches, self.stop_received)
        if loss is None:
            self.accelerator.print(f"step {step}: evaluation left out because the run stops")
            return False
        if self.accelerator.is_main_process:
            self.folder.append_event({"step": step, "attempt": self.attempt, "eval_loss": loss})
        if self.config.tracker:
            self.accelerator.log({"eval_loss": loss}, step=step)
        self.accelerator.print(f"step {step}: evaluation loss {loss:.4f}")
        if self.config.save_best and on_any_rank(
            math.isfinite(loss) and loss == min(self._eval_losses(), default=math.nan)
        ):
            self.beat.note("save")
            with self.window.saving("checkpoint"):
                save(prepared, tokenizer, self.folder.best)
            self.accelerator.print(
                f"step {step}: the lowest evaluation loss so far; its model is in {self.folder.best}"
            )
        if self.config.sample:
            self._print_sample(prepared, step, tokenizer)
        self.beat.note("between")
        return True

    def _print_sample(self, prepared: Prepared, step: int, tokenizer: Any) -> None:
        """Print an answer to `--sample`. All ranks generate it: each may hold a part of the weights."""
        ids, room = encode(tokenizer, self.preflight.spec, self.config.sample or "")
        prepared.model.eval()
        try:
            model = self.accelerator.unwrap_model(prepared.model)
            text = answer(model, tokenizer, ids, max_new_tokens=min(SAMPLE_TOKENS, room)).strip()
        except Exception as error:  # some models train and do not generate, which ends no run
            if is_out_of_memory(error):
                raise
            text = f"none, since {type(error).__name__}: {error}"
        prepared.model.train()
        self.accelerator.print(f"step {step}: sample: {text or '(empty: the model ended it at once)'}")

    def may_read_late(self, step: int) -> bool:
        """Return whether the numbers of a step may be read when the next one runs: not while memory is measured."""
        return self.machine.device.kind == "cuda" and step > MEASURED_STEPS and self._audit is not None

    def on_step_begin(self, step: int) -> None:
        """Note in the heartbeat that a step begins."""
        self.beat.note("begin", step=step)

    def on_step_end(self, prepared: Prepared, step: Step) -> None:
        """Record a step. Audit gradients and moments after the first step that fp16's scaler does not skip.

        Raises:
            StrategyMismatch: where they differ from the request.
        """
        self._last_step = step.step
        self._log.record(step)
        self.beat.note("between", step=step.step)
        self.window.step_done(step.step)
        if self._audit is None and not step.skipped:
            self._audit = audit(prepared, gradients=step.gradients)
        elif step.step == self.start + 2 and (wrong := wrong_parts(prepared)):
            # An adapter's first half has no gradient in the first step.
            raise StrategyMismatch(f"after step {step.step}: {'; '.join(wrong)}. Please report it.")
        if self.config.tracker:
            self.accelerator.log({"loss": step.loss, "grad_norm": step.grad_norm, "lr": step.lr}, step=step.step)

    def format_samples(self, step: int, tokenizer: Any) -> str:
        """Return the samples of a step, for an error message."""
        return spell_samples(self.preflight.rows, tokenizer, self.preflight.sample_ids(step))

    # After the last step ------------------------------------------------------------------------------------------------

    def end_stopped(self, step: int) -> int:
        """End a run that a signal stopped after `step`. Return its exit code.

        Call it while `listening()`: the launcher signals the other ranks when the first one has ended.
        """
        hint = "" if supervised() else f". {resume_hint(self.folder)}"
        self.accelerator.print(f"stopped after step {step}, as requested{hint}")
        self.accelerator.end_training()
        return 128 + (self.stop.number or signal.SIGTERM)

    def publish(self, prepared: Prepared, tokenizer: Any) -> None:
        """Export the model, write `memory.json`, check the export by reading it again, and mark the run as finished."""
        self.window.close()
        saved, export = {}, None
        if self.config.save:
            with self.window.saving():
                saved = save(prepared, tokenizer, self.folder.export, check=False)  # `verify` does
        self._write_memory(self._audit or audit(prepared), prepared)
        if self.config.save:
            rows = self.preflight.rows
            facts = {"data": f"fingerprint {rows.fingerprint}", "versions": format_versions(versions())}
            with phase("save"):
                batch = rows.batch([0], attention=self.job.strategy.attention)
                export = verify(prepared, self.folder.export, saved, batch, about=facts)
            self.accelerator.print(export or "")
        if self.accelerator.is_main_process:
            steps = self._last_step or self.start if self._ended_early else None
            finish(self.folder, export=export.to_dict() if export else None, steps=steps)
        self.accelerator.end_training()

    def _write_memory(self, last_audit: Audit, prepared: Prepared) -> None:
        """Write every rank's peaks and audit next to the forecast, and a pipeline's schedule as it ran."""
        from accelerate.utils import gather_object

        memory = measurement.collect(self.window.result(), on_device(self.job, last_audit.measured), gather_object)
        audits = gather_object([last_audit.to_dict()])
        timed = [steps for steps in gather_object([self.job.engine.timed_actions(prepared)]) if steps]
        if self.accelerator.is_main_process:
            forecast = self.preflight.forecast
            forecasts = {
                "forecast": forecast.to_dict() if forecast else None,
                "unforecast": self.preflight.unforecast,
            }
            ran = {"schedule": schedule_record(measured(timed))} if timed else {}
            write_json(self.folder.memory, {**memory.to_dict(), **forecasts, "audits": audits, **ran})
            self.accelerator.print(f"\n{last_audit}\n\n{memory}\n")


def _headline(job: Job) -> str:
    strategy, spec = job.strategy, job.spec
    assert spec is not None, "the preflight describes the model"
    return (
        f"{spec.architecture}, {spec.elements:,} parameters; sharding {strategy.label}, ranks {job.ranks} ({job.device.kind}); "
        f"precision {strategy.precision}, attention {strategy.attention}, "
        f"adapter {strategy.adapter}, activation checkpointing {strategy.activation_checkpointing}, loss {strategy.loss}, "
        f"lr {job.train_config.lr:g}; computes {job.engine.compute_note(job)}"
    )
