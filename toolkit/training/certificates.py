"""The guard: a small copy of a model takes two steps in one process and cut over ranks. The numbers must be the same.

It runs on CPU ranks, in forked processes of a child that sees no GPU, with random weights in fp32.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.config.fields import differing
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.display import Result, Table
from toolkit.core.errors import StrategyError
from toolkit.devices.machine import hardware
from toolkit.engines.job import Job
from toolkit.engines.resolution import resolve
from toolkit.models import ModelSpec, describe
from toolkit.models.small_copy import shrink
from toolkit.training.preflight import Preflight
from toolkit.training.small_run import GRADIENT, GUARD_STEPS, SAID, SEQ_LEN

SAME = ("precision", "activation_checkpointing", "loss")
"""Fields that every small run has alike."""

LONGEST = 300
"""Seconds of a small run. Ranks that still wait for each other are ended then."""

LOSS, NORM = 1e-5, 5e-5
"""Largest relative differences: of a loss, and of a gradient's norm."""


@dataclass(frozen=True, kw_only=True)
class Certificate(Result):
    """What the small copy computed in one process and over ranks."""

    json_fields = "* agrees"

    model: str
    strategy: Mapping[str, Any]
    """The fields that are not the default, as they ran: fp32, without offload."""
    ranks: int
    layers: int
    hidden: int
    loss_difference: float
    """The largest relative difference of a step's loss."""
    norm_difference: float
    """The relative difference of the first step's gradient norm, before it is clipped."""
    gradient: str | None
    """The first parameter with another gradient in the first step, in the model's order."""
    seconds: float

    @property
    def agrees(self) -> bool:
        """Return whether loss and norm are those of one process."""
        return self.loss_difference <= LOSS and self.norm_difference <= NORM and self.gradient is None

    def tables(self) -> list[Table]:
        """Return the differences beside their limits."""
        rows = [
            ("loss", f"{self.loss_difference:.1e}", f"{LOSS:.0e}"),
            ("gradient norm, first step", f"{self.norm_difference:.1e}", f"{NORM:.0e}"),
            ("first other gradient", self.gradient or "none", f"{GRADIENT:.0e}"),
        ]
        words = ", ".join(f"{name} {value}" for name, value in self.strategy.items() if name not in SAME)
        answer = "as one process" if self.agrees else "NOT as one process"
        return [
            Table(
                title=f"{self.model}, {words}, {self.ranks} ranks: {answer}",
                columns=("figure", "difference", "at most"),
                rows=rows,
                notes=(
                    f"{GUARD_STEPS} steps of a copy of {self.layers} layers, hidden size {self.hidden}, {self.seconds:.0f} s",
                ),
            )
        ]


def guard(model: str | Path | ModelSpec, strategy: Strategy, *, ranks: int | None = None) -> Certificate:
    """Train a small copy of a model in one process and cut over CPU ranks, and compare. No weights are read.

    Args:
        model: a Hub id, a folder, or what `describe` returned.
        strategy: with `tp`, `cp`, `ep` or `pp`. The copy runs in fp32 without offload.
        ranks: of the planned run; by default the fewest on which every degree does something.

    Raises:
        StrategyError: for a strategy that cuts nothing, a model that has no small copy, and a copy that does not run.
    """
    spec = model if isinstance(model, ModelSpec) else describe(str(model))
    if strategy.tp * strategy.cp * strategy.ep * strategy.pp == 1:
        raise StrategyError("guard: nothing is cut. Give --tp N, --cp N, --ep N or --pp N.")
    train_config = TrainConfig(accumulation=2 * strategy.pp, seq_len=SEQ_LEN)
    return certify(resolve(strategy, train_config, spec, ranks or strategy.least_ranks, hardware("cpu").device))


def certify(job: Job) -> Certificate:
    """Do the same for a job: its degrees stay, on the fewest ranks on which each does something."""
    assert job.spec is not None, "a cut over ranks needs a description"
    began, sizes = time.monotonic(), job.parallelism
    given = job.strategy
    strategy = replace(
        given, precision="fp32", offload="none", compile=False, activation_checkpointing="none", lora_dropout=0.0,
        bucket_elements=None, gather_bucket_elements=None, live_elements=None, overlap_comm="auto",
        dp_replicate=min(2, given.dp_replicate),
        attention="eager" if given.attention == "eager" else "auto", grad_accum_dtype="auto",
        adapter="none" if given.quantized else given.adapter,
    )  # fmt: skip
    # Twice as many where there are experts: FSDP then shards those of a group, too.
    ranks = min(strategy.least_ranks * (2 if sizes.ep > sizes.tp else 1), job.ranks)
    try:
        config = shrink(job.spec, sizes.tp * sizes.cp, sizes.ep, stages=len(job.settings.get("stages", ())))
    except Exception as error:  # configs check themselves, each in its own way
        raise _refusal(f"{job.spec.name} has no small copy ({error})") from None
    request = {"config": config.to_dict(), "strategy": differing(strategy), "ranks": ranks}
    request["tp_plan"] = dict(job.spec.tp_plan)
    command = [sys.executable, "-P", "-c", f"from toolkit.training.small_run import main; main({os.getpid()})"]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "env": environ, "timeout": LONGEST}
    try:
        ended = subprocess.run(command, input=json.dumps(request), **options)
    except subprocess.TimeoutExpired:
        raise _refusal(f"a small copy of {job.spec.name} took longer than {LONGEST} s") from None
    if ended.returncode:
        lines = ended.stderr.splitlines() or ["its processes were ended"]
        why = next((line.removeprefix(SAID) for line in lines if line.startswith(SAID)), lines[-1]).rstrip(". ")
        raise _refusal(f"a small copy of {job.spec.name} did not run: {why}")
    text = config.get_text_config(decoder=True)
    return Certificate(
        model=job.spec.name,
        strategy=differing(strategy),
        ranks=ranks,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        seconds=time.monotonic() - began,
        **json.loads(ended.stdout.splitlines()[-1]),
    )


def guarded(preflight: Preflight, run_config: RunConfig) -> Preflight:
    """Return the preflight with the certificate of a run that cuts its model over ranks.

    Raises:
        StrategyError: where the cut does not compute what one process computes.
    """
    sizes = preflight.job.parallelism
    if not run_config.guard or sizes.tp * sizes.cp * sizes.ep * sizes.pp == 1:
        return preflight
    certificate = certify(preflight.job)
    figures = f"losses {certificate.loss_difference:.0e} and gradient norms {certificate.norm_difference:.0e}"
    if not certificate.agrees:
        first = f"; the first parameter with another gradient is {certificate.gradient}" if certificate.gradient else ""
        raise StrategyError(
            f"guard: the cut of {certificate.model} does not compute what one process computes. A small copy over "
            f"{certificate.ranks} ranks differs by {figures}{first}. Choose a sharding without tp, cp, ep and pp, or --no-guard."
        )
    note = f"guard: a small copy over {certificate.ranks} ranks computes as one process does, {figures} apart"
    return replace(preflight, notes=(*preflight.notes, note), guard=certificate.to_dict())


def _refusal(what: str) -> StrategyError:
    return StrategyError(f"guard: {what}. With --no-guard a run starts without it.")
