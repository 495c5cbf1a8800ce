"""`rehearse()`: the code of one rank of any number, alone. Its memory is real, its values mean nothing.

A child takes three steps over torch's fake process group, where what is sent goes nowhere. Weights are zeros in a file without
content, of which only what the rank reads comes into memory: one rank of a model of any size can be rehearsed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.config.fields import differing, from_dict
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.display import Result, Table
from toolkit.core.errors import StrategyError, ToolkitError
from toolkit.core.phases import PHASES
from toolkit.core.process_lifecycle import die_with_parent, import_libraries
from toolkit.core.units import format_bytes, format_step_seconds
from toolkit.devices.machine import hardware
from toolkit.engines.job import Job
from toolkit.engines.resolution import resolve
from toolkit.forecasting import Forecast
from toolkit.forecasting.prediction import forecast_job
from toolkit.models import ModelSpec, describe
from toolkit.models.files import SAFETENSORS_DTYPES, first_line
from toolkit.training.small_run import OTHERS, SAID

STEPS = 3
"""The first makes the moments, the third is like all that follow."""

REFUSED = {
    "ddp": "torch's DDP waits for the sums that other ranks send",
    **dict.fromkeys(("zero1", "zero2", "zero3"), "DeepSpeed needs the other ranks"),
}
"""Shardings without a rehearsal, and why."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal(Result):
    """One rank's memory as it was measured, beside the forecast."""

    json_fields = "* ratio"

    model: str
    strategy: Mapping[str, Any]
    """The fields that are not the default."""
    ranks: int
    rank: int
    phases: Mapping[str, int]
    """The allocator's highest total of each phase, in bytes."""
    peak_bytes: int
    forecast_phases: Mapping[str, int]
    forecast_peak_bytes: int
    """Of the fullest rank."""
    sent_bytes: int
    """What the rank would send in a step, by the forecast."""
    step_seconds: float
    """Of the third step, without any communication, on this machine."""

    @property
    def ratio(self) -> float:
        """The forecast peak as a multiple of the measured one."""
        return self.forecast_peak_bytes / self.peak_bytes

    def tables(self) -> list[Table]:
        """Return measured and forecast bytes by phase."""
        words = ", ".join(f"{name} {value}" for name, value in self.strategy.items()) or "none"
        sizes = [(name, self.phases[name], self.forecast_phases.get(name, 0)) for name in PHASES if name in self.phases]
        rows = [
            (
                name,
                format_bytes(measured),
                format_bytes(expected),
                f"{expected / measured - 1:+.1%}" if measured else "–",
            )
            for name, measured, expected in (*sizes, ("peak", self.peak_bytes, self.forecast_peak_bytes))
        ]
        notes = (
            f"A step computes for {format_step_seconds(self.step_seconds)} here, and would send {format_bytes(self.sent_bytes)}. "
            "Values mean nothing: what other ranks send is not there.",
        )
        title = f"{self.model}, {words}: rank {self.rank} of {self.ranks}"
        columns = ("phase", "measured", "forecast, fullest rank", "difference")
        return [Table(title=title, columns=columns, rows=rows, notes=notes)]


def rehearse(
    model: str | Path | ModelSpec,
    strategy: Strategy | None = None,
    train_config: TrainConfig | None = None,
    *,
    ranks: int,
    rank: int = 0,
) -> Rehearsal:
    """Run the code of one rank of `ranks` on this machine, with real tensors and without the other ranks.

    Args:
        model: a Hub id, a folder, or what `describe` returned. No weights are read.
        strategy: with `none` or of the FSDP family, with `tp` or `cp`.
        train_config: batch and lengths.
        ranks: of the planned run.
        rank: which of them, from 0.

    Raises:
        StrategyError: for a rank that does not exist, and for what cannot run without the other ranks.
        ToolkitError: where the rank fails, as it does out of memory.
    """
    spec, machine = model if isinstance(model, ModelSpec) else describe(str(model)), hardware()
    job = resolve(strategy or Strategy(), train_config or TrainConfig(), spec, ranks, machine.device)
    _refuse(job, rank)
    forecast = forecast_job(job, machine, one_document=True, save=False, num_checkpoints=0)
    values = {
        "strategy": differing(job.strategy),
        "train_config": asdict(job.train_config),
        "ranks": ranks,
        "rank": rank,
    }
    measured = _run_child({**values, "config": spec.config})
    return _joined(job, rank, measured, forecast)


def _refuse(job: Job, rank: int) -> None:
    strategy, why = job.strategy, REFUSED.get(job.strategy.sharding, "")
    if not 0 <= rank < job.ranks:
        raise StrategyError(f"rank {rank}: expected 0 to {job.ranks - 1}.")
    if job.ranks == 1:
        raise StrategyError("rehearse: one rank has no others to leave out. Train it: `toolkit train --steps 3`.")
    if why:
        raise StrategyError(f"rehearse: sharding {strategy.sharding!r} has no rehearsal: {why}. Choose fsdp.")
    if job.spec is not None and job.spec.moe is not None:
        raise StrategyError(
            f"rehearse: which experts of {job.spec.architecture} get tokens depends on values, which a rehearsal lacks. Give a "
            "dense model."
        )
    if strategy.pp > 1:
        raise StrategyError("rehearse: a stage waits for what the one before it sends. Leave out --pp.")
    if strategy.quantized:
        raise StrategyError(f"rehearse: adapter {strategy.adapter!r} packs real weights. Choose --adapter lora.")


def _joined(job: Job, rank: int, measured: Mapping[str, Any], forecast: Forecast) -> Rehearsal:
    assert job.spec is not None, "a rehearsal has a description"
    return Rehearsal(
        model=job.spec.name,
        strategy=differing(job.strategy),
        ranks=job.ranks,
        rank=rank,
        forecast_phases={name: forecast.phases[name] for name in PHASES if name in forecast.phases},
        forecast_peak_bytes=forecast.peak_bytes,
        sent_bytes=forecast.communication_bytes,
        **measured,
    )


def _run_child(request: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-P", "-c", f"from toolkit.training.rehearsal import main; main({os.getpid()})"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
    place = {"RANK": request["rank"], "WORLD_SIZE": request["ranks"], "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ended = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, env=environ)
    if ended.returncode:
        lines = ended.stderr.splitlines() or ["its process was ended, perhaps for lack of memory"]
        why = next((line.removeprefix(SAID) for line in lines if line.startswith(SAID)), lines[-1]).rstrip(". ")
        if ended.returncode < 0:
            why = f"its process was ended by {signal.Signals(-ended.returncode).name}, perhaps for lack of memory"
        raise ToolkitError(f"rehearse: rank {request['rank']} of {request['ranks']} did not run: {why}.")
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


# The child ------------------------------------------------------------------------------------------------------------


def write_zeros(folder: str, config: Mapping[str, Any]) -> None:
    """Write a model's folder: a config, a tokenizer, and weights that are zeros in a file that takes no space on a disk."""
    import torch
    from transformers import AutoConfig

    from toolkit.data.embedded import embedded_tokenizer
    from toolkit.models.hf_loading import auto_class

    values = dict(config)
    made = AutoConfig.for_model(values.pop("model_type"), **values)
    made.save_pretrained(folder)
    embedded_tokenizer(Path(folder))
    with torch.device("meta"):
        model = auto_class(describe(folder)).from_config(made)
    names = {name: code for code, name in SAFETENSORS_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end, known = 0, set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in known:  # tied
            continue
        known.add(id(tensor))
        begin, end = end, end + tensor.nbytes
        dtype = names[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with Path(folder, "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _rows(vocab: int, train_config: TrainConfig, positions: bool) -> Iterator[dict[str, Any]]:
    """Yield the rank's micro-batches: one document a row, without padding."""
    import torch

    shape = (train_config.micro_batch, train_config.seq_len)
    for _ in range(STEPS * train_config.accumulation):
        ids = torch.randint(vocab, shape)
        batch = {"input_ids": ids, "labels": ids.clone()}
        yield batch | ({"position_ids": torch.arange(shape[1]).repeat(shape[0], 1)} if positions else {})


def _allocate_as_gloo(copies: list[Any], *, keeps: bool) -> None:
    """Let FSDP2's collectives take the memory that gloo takes: it gathers and reduces in buffers of its own.

    Args:
        copies: gets the copy of the gradients that were reduced last. On busy processors gloo's thread frees it once the next
            module's backward begins (`_free_copies`).
        keeps: False where an all-reduce follows, which takes longer than that.
    """
    import torch
    import torch.distributed as dist

    def collect(original: Any, output: torch.Tensor, input: torch.Tensor, **named: Any) -> Any:
        copies.clear()
        copies.append(torch.empty_like(max(output, input, key=torch.Tensor.numel)))
        if not keeps or output.numel() > input.numel():
            copies.clear()
        return original(output, input, **named)

    for name in ("all_gather_single", "reduce_scatter_single"):
        vars(dist)[name] = partial(collect, getattr(dist, name))


def _free_copies(model: Any, copies: list[Any]) -> None:
    """Free gloo's copies as the backward of a module with gathered parameters begins, after FSDP2's own hooks."""
    import torch
    from torch.distributed.fsdp import FSDPModule
    from torch.utils._pytree import tree_leaves

    def after(module: Any, inputs: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: copies.clear())  # type: ignore[no-untyped-call]

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_hook(after)  # type: ignore[attr-defined]


def _measure(folder: str, request: Mapping[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from toolkit import measurement
    from toolkit.core.phases import observe, phase
    from toolkit.models.varlen import separates_documents
    from toolkit.training.loading import load
    from toolkit.training.loop import train
    from toolkit.training.optimizers import make_optimizer, make_schedule
    from toolkit.training.preparation import prepare, prepared
    from toolkit.training.setup import accelerator as make
    from toolkit.training.setup import seed_everything

    spec, strategy = describe(folder), from_dict(Strategy, request["strategy"])
    train_config = replace(from_dict(TrainConfig, request["train_config"]), steps=STEPS, epochs=None, warmup=0)
    dist.init_process_group("fake", store=FakeStore(), rank=request["rank"], world_size=request["ranks"])
    copies: list[Any] = []
    observe(lambda *_: copies.clear())
    window = measurement.start(kind := hardware().device.kind)
    if kind == "cpu":
        _allocate_as_gloo(copies, keeps=strategy.dp_replicate == 1)
    with phase("load"):
        accelerator = make(strategy, train_config, spec)
        accelerator.print = lambda *_: None
        seed_everything(accelerator)
        model, _ = load(accelerator)
        optimizer: Any = make_optimizer(model, train_config, fused=accelerator.scaler is None)
        schedule = make_schedule(optimizer, train_config)
    with phase("prepare"):
        model, optimizer = prepare(accelerator, model, optimizer)
    _free_copies(model, copies)
    rows, seconds = _rows(spec.vocab, train_config, separates_documents(spec, joined=False)), 0.0
    for step in train(prepared(accelerator, (model, optimizer)), rows, schedule):
        seconds = step.seconds
    window.close()
    result = window.result()
    if result.peak_bytes is None:
        raise ToolkitError(f"nothing was measured: {result.reason}")
    return {"phases": dict(result.phases), "peak_bytes": result.peak_bytes, "step_seconds": seconds}


def main(parent: int) -> None:
    """Read a request from standard input, and print what was measured as JSON. It ends with the process `parent`."""
    die_with_parent(parent)
    request = json.load(sys.stdin)
    import_libraries("transformers.modeling_utils")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        try:
            write_zeros(folder, request["config"])
            answer = _measure(folder, request)
        except Exception as error:
            print(f"{SAID}{first_line(error)} ({type(error).__name__})", file=sys.stderr)
            raise
    print(json.dumps(answer))
