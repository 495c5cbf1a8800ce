"""What others published of large runs, beside what `tk.forecast` says of the same; nothing is launched or downloaded.

    python benchmarks/published.py                     # results into benchmarks/results/published.json and .md
    python benchmarks/published.py --smoke             # whether it still runs: two of the runs

The runs are in `published_runs.py`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from machine import about, parse, parser, write_results
from published_runs import ARTICLE_HOST, BEYOND, Largest, Published, accelerate_article, runs

import toolkit as tk
from toolkit.core.display import Table
from toolkit.core.units import format_bytes
from toolkit.engines.resolution import resolve
from toolkit.forecasting import forecast_job
from toolkit.forecasting.result import Forecast
from toolkit.transforms import adapters

SMOKE = ("SmolLM2-135M, LoRA, eager, 1 x 4,096, T4", "GPT-2 10B, ZeRO-2, optimizer offloaded, 1 x V100 32 GB")
"""Runs with a forecast in seconds, and with every kind of figure but the host's."""

STEP = ("forward", "backward", "step")
"""The phases. The highest of them is compared."""


@contextmanager
def keep_peft_casts() -> Iterator[None]:
    """Trace adapters with PEFT's casts of inputs, which the published T4 runs had, and the toolkit leaves out under autocast."""
    import peft  # noqa: F401 - so that adapters are traced here, and not in a child process each

    with (
        tempfile.TemporaryDirectory() as cache,  # the usual one holds traces of the toolkit's own adapters
        patch.dict(os.environ, XDG_CACHE_HOME=cache),
        patch.object(adapters, "keep_input_dtype", lambda _: None),
    ):
        yield


def compared(run: Published) -> dict[str, Any]:
    """The publication's figures and ours."""
    spec = tk.describe(run.config)
    machine = tk.hardware(run.hardware, run.host_memory)
    job = resolve(run.strategy, run.train_config, spec, machine.ranks, machine.device)
    found = forecast_job(job, machine, one_document=True)
    time = found.timing
    step = {phase: found.phases[phase] + (0 if phase == "forward" else run.kept) for phase in STEP}
    ours = {
        "memory": max(step.values()),
        "host": found.host_bytes,
        "speed": time.tokens_per_second / machine.ranks if time else None,
        "tflops": found.operations / time.step_seconds / 1e12 if time else None,
    }
    return {
        "what": run.what,
        "source": run.source,
        "assumed": run.assumed,
        "published": {name: getattr(run, name) for name in (*ours, "phases", "process")},
        "forecast": {**ours, "step": step, "phases": dict(found.phases)},
        "lacks": None if found.fits else (found.peak_phase, found.needed_bytes, found.limit_bytes),
        "strategy": dataclasses.asdict(found.strategy),
        "train_config": dataclasses.asdict(found.train_config),
    }


def _bytes(size: float) -> str:
    return format_bytes(round(size))


FIGURES: dict[str, tuple[str, Any, float]] = {
    "memory": ("memory of a GPU", _bytes, 0.10),
    "host": ("memory of the host", _bytes, 0.10),
    "speed": ("tokens/s a GPU", "{:,.0f}".format, 0.25),
    "tflops": ("TFLOP/s a GPU", "{:,.1f}".format, 0.25),
}
"""In words, how it is shown, and how near a forecast should be."""


def figures(rows: Sequence[dict[str, Any]]) -> tuple[list[tuple[Any, ...]], list[str]]:
    """A line for each figure that was published, and how many of a kind are as near as they should be."""
    lines: list[tuple[Any, ...]] = []
    counts = []
    for name, (named, shown, near) in FIGURES.items():
        pairs = [(row, row["published"][name], row["forecast"][name]) for row in rows]
        known = [(row, said, ours) for row, said, ours in pairs if said and ours]
        lines += [(row["what"], named, shown(said), shown(ours), f"{ours / said:.2f}") for row, said, ours in known]
        within = sum(abs(ours / said - 1) <= near for _, said, ours in known)
        counts.append(f"{named}: {within} of {len(known)} within {near:.0%}")
    return lines, counts


def by_phase(rows: Sequence[dict[str, Any]]) -> str:
    """How near each phase's peak is, where the publication tells it."""
    told = []
    for phase in STEP:
        ratios = [row["forecast"]["step"][phase] / said[phase] for row in rows if (said := row["published"]["phases"])]
        told.append(f"{phase} {min(ratios):.3f} to {max(ratios):.3f}")
    return f"Phase by phase, where the publication tells it: {', '.join(told)}."


def too_large(rows: Sequence[dict[str, Any]]) -> Table:
    """All of them ran: those that the forecast rejects."""
    found = [(row["what"], *row["lacks"]) for row in rows if row["lacks"]]
    return Table(
        title=f"{len(rows)} ran; the forecast rejects {len(found)}",
        columns=("run", "phase", "needs", "a GPU has"),
        rows=[(what, phase, _bytes(need), _bytes(has)) for what, phase, need, has in found],
    )


def beyond_the_allocator(rows: Sequence[dict[str, Any]]) -> str:
    """What a process took of its GPU beside its allocator's peak, which is all that a forecast knows."""
    said = [row["published"] for row in rows]
    more = [one["process"] / one["memory"] - 1 for one in said if one["process"]]
    return (
        "Context and fragmentation are not in these figures, but in `fits`: "
        f"in the {len(more)} runs with both figures published, the process took "
        f"{statistics.median(more):.0%} more in the median, {max(more):.0%} at most."
    )


def forecast_batch(run: Largest, micro_batch: int) -> Forecast:
    """The forecast of one micro-batch."""
    machine = tk.hardware(run.hardware, ARTICLE_HOST)
    step = tk.TrainConfig(micro_batch=micro_batch, seq_len=run.seq_len)
    job = resolve(run.strategy, step, tk.describe(run.config), machine.ranks, machine.device)
    return forecast_job(job, machine, one_document=True, num_checkpoints=0)


def largest_batch(run: Largest) -> int:
    """Return the largest micro-batch that fits by its forecast; 0 where 1 does not fit."""
    fits, above = 0, 1
    while forecast_batch(run, above).fits:
        fits, above = above, 2 * above
    while above - fits > 1:
        middle = (fits + above) // 2
        fits, above = (middle, above) if forecast_batch(run, middle).fits else (fits, middle)
    return fits


def article_rows(smoke: bool) -> list[dict[str, Any]]:
    """The article's figures and ours; an epoch at the published micro-batch."""
    rows = []
    for run in list(accelerate_article())[-2 if smoke else 0 :]:
        time = forecast_batch(run, max(1, run.micro_batch)).timing
        assert time is not None, "the catalog knows the card"
        steps = math.ceil(run.rows / (max(1, run.micro_batch) * tk.hardware(run.hardware).ranks))
        rows.append(
            {
                "what": run.what,
                "published": {"micro_batch": run.micro_batch, "epoch_seconds": run.epoch_seconds},
                "evaluation": run.evaluation,
                "forecast": {"micro_batch": largest_batch(run), "epoch_seconds": steps * time.step_seconds},
            }
        )
    return rows


def article_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Largest micro-batches and epochs beside each other."""

    def cells(row: dict[str, Any]) -> Iterator[str]:
        said, ours = row["published"], row["forecast"]
        yield from (str(figures["micro_batch"] or "not even 1") for figures in (said, ours))
        epoch = said["epoch_seconds"]
        yield from (f"{epoch:,.1f} s", f"{ours['epoch_seconds']:,.1f} s") if epoch else ("–", "–")
        yield row["evaluation"]

    return Table(
        title="Largest micro-batch, and an epoch at the published one",
        columns=("run", "batch, published", "forecast", "epoch, published", "forecast", "evaluation, published"),
        rows=[(row["what"], *cells(row)) for row in rows],
        notes=(
            "huggingface.co/blog/accelerate-deepspeed: TITAN RTX of 24 GB, 60 GB of host memory, fp16, eager attention, no "
            "checkpointing of activations or of the run. BlenderBot: 10,000 rows, source 128 and target 64 tokens; here 73 of "
            "each, with as many tokens times layers. Published batches are round numbers: the next hundred does not fit in the "
            "forecast either. GPT-XL: wikitext-2, block 128. Its evaluation generates text with ten beams, which the toolkit "
            "does not do.",
        ),
    )


def main() -> None:
    """Forecast every one, print the table, write the results."""
    arguments = parse(parser(__doc__))
    with keep_peft_casts():
        rows = [compared(run) for run in runs() if not arguments.smoke or run.what in SMOKE]
    lines, counts = figures(rows)
    said = list(dict.fromkeys(f"{row['source']}: {row['assumed']}." for row in rows))
    notes = (
        "; ".join(counts) + ".",
        "Memory is the highest of forward, backward and step, as PyTorch's allocator counts it. "
        f"{by_phase(rows)} {beyond_the_allocator(rows)}",
        *said,
    )
    columns = ("run", "figure", "published", "forecast", "ratio")
    found = [
        Table(title="Published runs beside the forecast", columns=columns, rows=lines, notes=notes),
        *([too_large(rows)] if any(row["lacks"] for row in rows) else []),
    ]
    article = article_rows(arguments.smoke)
    found.append(article_table(article))
    left = [(one.what, one.said, one.needs, one.source) for one in BEYOND]
    found.append(Table(title="Not forecastable yet", columns=("run", "published", "needs", "source"), rows=left))
    text = "\n\n".join(map(Table.text, found))
    print(text)
    beyond = [dataclasses.asdict(one) for one in BEYOND]
    result = {**about(), "runs": rows, "largest": article, "not_forecastable": beyond}
    write_results(arguments.results, "published", "Published runs beside the forecast", result, text)


if __name__ == "__main__":
    main()
