"""Forecasts of every rank beside real runs over meshes: tensor, context, expert and pipeline parallelism, alone and together.

    python benchmarks/meshes.py                      # all cells; results into benchmarks/results/meshes.json and .md
    python benchmarks/meshes.py --only pp,lora       # cells with these in their names
    python benchmarks/meshes.py --smoke              # whether it still runs: one cell, and two steps of parity

Each cell is the recipe, `toolkit.finetune`, for three steps over a model of random weights, in real processes. Its forecast is made
before. A cell that the results hold for these versions and this machine is not run again, and its forecast is made again. Each row
has the commit that measured it, and the one that made its forecast.

Then runs of 20 steps take the same rows in one process and over each degree, alone and with another, with `ddp` or `fsdp` inside:
losses and norms have to be the same.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from families import SIZES, STEPS, checkpoint
from forecast_accuracy import LEAST, line, without_places
from forking import Ranks, server
from machine import about, commit, parse, parser, stored, write_results

import toolkit as tk
from toolkit.config.flags import spell
from toolkit.core.atomic_io import read_events
from toolkit.core.display import Table
from toolkit.core.errors import ToolkitError
from toolkit.core.units import format_bytes

SHAPE = "mesh"
BATCHES = (1, 2, 4, 8, 16, 24)
"""The smallest with a forecast of at least `LEAST` bytes on every rank is run."""

BF16, PURE, LORA, DORA = {"precision": "bf16"}, {"precision": "bf16_pure"}, {"adapter": "lora"}, {"adapter": "dora"}
DDP, FSDP, GRAD_OP = {"sharding": "ddp"}, {"sharding": "fsdp"}, {"sharding": "fsdp_grad_op"}
HSDP = {"sharding": "hsdp", "dp_replicate": 2}
PLAIN, CHUNKED, GATHER = {"activation_checkpointing": "none"}, {"loss": "chunked"}, {"cp_attention": "gather"}
WHOLE_LOSS = {"loss": "whole"}
GPIPE, INTERLEAVED = {"pp_schedule": "gpipe"}, {"pp_schedule": "interleaved"}
LOOPED, ZERO_BUBBLE = {"pp_schedule": "looped_bfs"}, {"pp_schedule": "zero_bubble"}

MEASURED = ("measured_peaks", "measured_phases", "date", "commit", "failed")
"""What a row keeps where its forecast is made again."""

CHARACTERS = 300_000
"""Of the one document that every run reads."""

Cell = tuple[str, int, dict[str, Any]]
CELLS: list[Cell] = [
    # Tensor parallel.
    ("Llama", 2, {"tp": 2}),
    ("Llama", 4, {"tp": 2, **FSDP}),
    ("Qwen3", 4, {"tp": 2, **FSDP, **BF16}),
    ("Qwen3", 4, {"tp": 4, **PLAIN}),
    ("Gemma3", 2, {"tp": 2, **BF16}),
    ("Mistral", 4, {"tp": 2, **DDP}),
    ("GPT-NeoX", 4, {"tp": 2, **FSDP, **CHUNKED}),
    ("Llama", 4, {"tp": 4, **BF16}),
    ("Llama", 4, {"tp": 2, **GRAD_OP, **BF16}),
    ("Llama", 8, {"tp": 2, **HSDP}),
    ("Llama", 4, {"tp": 2, **FSDP, **LORA, **BF16}),
    ("Mistral", 2, {"tp": 2, **LORA, **PLAIN}),
    ("Qwen3", 4, {"tp": 2, **GRAD_OP, **LORA, **BF16}),
    # Context parallel.
    ("Llama", 2, {"cp": 2, **FSDP}),
    ("Qwen3", 2, {"cp": 2, **FSDP, **BF16}),
    ("Mistral", 4, {"cp": 2, **FSDP, **GATHER}),
    ("Llama", 4, {"cp": 4, **FSDP, **PLAIN}),
    ("Llama", 2, {"cp": 2, **DDP}),
    ("Gemma3", 2, {"cp": 2, **FSDP}),
    ("Llama", 4, {"cp": 2, "sharding": "zero3"}),
    ("Qwen3", 4, {"cp": 2, "sharding": "zero2", **BF16}),
    ("Llama", 2, {"cp": 2, **FSDP, **LORA, **BF16}),
    ("Qwen3", 2, {"cp": 2, **FSDP, **LORA}),
    ("GPT-NeoX", 2, {"cp": 2, **GRAD_OP, **CHUNKED}),
    ("Mistral", 8, {"cp": 2, **HSDP}),
    ("Llama", 2, {"cp": 2, **DDP, **DORA, **PLAIN}),
    # Expert parallel.
    ("Mixtral", 2, {"ep": 2, **FSDP}),
    ("Mixtral", 4, {"ep": 2, **FSDP, **BF16}),
    ("Mixtral", 4, {"ep": 4, **FSDP}),
    ("Qwen2-MoE", 2, {"ep": 2, **FSDP}),
    ("Qwen2-MoE", 4, {"ep": 4, **FSDP, **BF16}),
    ("GPT-OSS", 2, {"ep": 2, **FSDP}),
    ("GPT-OSS", 4, {"ep": 2, **GRAD_OP, **BF16}),
    ("DeepSeek-V3", 2, {"ep": 2, **FSDP}),
    ("Qwen2-MoE", 4, {"ep": 2, **FSDP, **PLAIN}),
    # Pipelines, at least four of each schedule.
    ("Llama", 2, {"pp": 2}),
    ("Qwen3", 2, {"pp": 2, **BF16}),
    ("GPT-2", 4, {"pp": 4, **PLAIN}),
    ("Llama", 4, {"pp": 2, **FSDP, **BF16}),
    ("Llama", 2, {"pp": 2, **GPIPE}),
    ("Qwen3", 4, {"pp": 4, **GPIPE}),
    ("Gemma3", 2, {"pp": 2, **GPIPE, **BF16}),
    ("Llama", 2, {"pp": 2, **INTERLEAVED}),
    ("Mistral", 4, {"pp": 4, **INTERLEAVED, **BF16}),
    ("Llama", 4, {"pp": 2, **INTERLEAVED, **FSDP}),
    ("Llama", 2, {"pp": 2, **LOOPED}),
    ("GPT-NeoX", 4, {"pp": 4, **LOOPED}),
    ("Qwen3", 4, {"pp": 2, **LOOPED, **FSDP}),
    ("Llama", 2, {"pp": 2, **ZERO_BUBBLE}),
    ("Mistral", 4, {"pp": 4, **ZERO_BUBBLE}),
    ("Llama", 4, {"pp": 2, **ZERO_BUBBLE, **FSDP, **BF16}),
    ("Llama", 2, {"pp": 2, **LORA, **BF16}),
    ("Mistral", 4, {"pp": 2, **FSDP, **LORA}),
    ("GPT-NeoX", 2, {"pp": 2, **GPIPE, **LORA}),
    ("Llama", 4, {"pp": 2, **DDP}),
    ("Mixtral", 2, {"pp": 2}),
    # Two of these together.
    ("Llama", 4, {"tp": 2, "cp": 2}),
    ("Llama", 8, {"tp": 2, "cp": 2, **FSDP}),
    ("Qwen3", 8, {"tp": 2, "cp": 2, **FSDP, **BF16}),
    ("Llama", 4, {"tp": 2, "cp": 2, **LORA, **BF16}),
    ("Mixtral", 2, {"tp": 2, "ep": 2}),
    ("Mixtral", 4, {"tp": 2, "ep": 2, **FSDP}),
    ("Mixtral", 4, {"tp": 2, "ep": 4, **FSDP, **BF16}),
    ("Qwen2-MoE", 2, {"tp": 2, "ep": 2}),
    ("Qwen2-MoE", 4, {"tp": 2, "ep": 2, **FSDP, **BF16}),
    ("Mixtral", 8, {"tp": 2, "ep": 2, **HSDP}),
    ("Llama", 4, {"pp": 2, "tp": 2}),
    ("Qwen3", 4, {"pp": 2, "tp": 2, **BF16}),
    ("Gemma3", 4, {"pp": 2, "tp": 2, **GPIPE}),
    ("Llama", 8, {"pp": 2, "tp": 2, **FSDP}),
    ("Qwen3", 8, {"pp": 2, "tp": 2, **FSDP, **BF16}),
    ("Mistral", 4, {"pp": 2, "tp": 2, **INTERLEAVED}),
    ("Llama", 8, {"pp": 2, "tp": 2, **DDP, **GPIPE}),
    ("Llama", 4, {"pp": 2, "tp": 2, **LOOPED, **BF16}),
    ("Mistral", 4, {"pp": 2, "tp": 2, **ZERO_BUBBLE}),
    ("Llama", 4, {"pp": 2, "tp": 2, **LORA, **BF16}),
    ("Llama", 8, {"pp": 2, "tp": 2, **FSDP, **LORA, **BF16}),
    ("Gemma3", 4, {"pp": 2, "tp": 2, **LORA, **PLAIN}),
    ("Llama", 8, {"pp": 4, "tp": 2}),
    ("Mistral", 4, {"pp": 2, "tp": 2, **GPIPE, **BF16}),
    ("GPT-NeoX", 4, {"pp": 2, "tp": 2, **CHUNKED}),
    ("Qwen3", 8, {"pp": 2, "tp": 2, **DDP}),
    ("Llama", 8, {"pp": 2, "tp": 2, **FSDP, **INTERLEAVED}),
]
"""Family, ranks, and fields of the strategy."""

SMOKE: Cell = ("Llama", 2, {"pp": 2})

PARITY: dict[str, tuple[str, int, dict[str, Any]]] = {
    "pp 2": ("Qwen3", 2, {"pp": 2}),
    "pp 2, gpipe": ("Gemma3", 2, {"pp": 2, **GPIPE, **PLAIN}),
    "pp 2, interleaved": ("Llama", 2, {"pp": 2, **INTERLEAVED}),
    "pp 2, looped_bfs": ("Llama", 2, {"pp": 2, **LOOPED, **WHOLE_LOSS}),
    "pp 2, zero_bubble": ("Llama", 2, {"pp": 2, **ZERO_BUBBLE, **PLAIN}),
    "pp 2 in ddp": ("Qwen3", 4, {"pp": 2, **DDP}),
    "pp 2 in fsdp": ("Llama", 4, {"pp": 2, **FSDP}),
    "tp 2 in ddp": ("Qwen3", 4, {"tp": 2, **DDP, **PLAIN}),
    "tp 2 in fsdp": ("Llama", 4, {"tp": 2, **FSDP, **WHOLE_LOSS}),
    "tp 2, tokens divided, in fsdp": ("Llama", 4, {"tp": 2, "tp_sequence": True, **FSDP}),
    "tp 2 in fsdp, lora": ("Qwen3", 4, {"tp": 2, **FSDP, **LORA, "lora_dropout": 0.0}),
    "cp 2 in ddp": ("Llama", 4, {"cp": 2, **DDP}),
    "cp 2 in fsdp": ("Qwen3", 4, {"cp": 2, **FSDP, **PLAIN}),
    "ep 2 in fsdp": ("Mixtral", 2, {"ep": 2, **FSDP}),
    "tp 2, cp 2 in ddp": ("Qwen3", 8, {"tp": 2, "cp": 2, **DDP}),
    "tp 2, cp 2 in fsdp": ("Llama", 8, {"tp": 2, "cp": 2, **FSDP, **GATHER, **WHOLE_LOSS}),
    "tp 2, ep 2 in fsdp": ("Mixtral", 4, {"tp": 2, "ep": 2, **FSDP, **PLAIN}),
    "cp 2, ep 4 in fsdp": ("Mixtral", 4, {"cp": 2, "ep": 4, **FSDP}),
    "pp 2, tp 2": ("Qwen3", 4, {"pp": 2, "tp": 2}),
    "pp 2, tp 2, gemma": ("Gemma3", 4, {"pp": 2, "tp": 2, **WHOLE_LOSS}),
    "pp 2, tp 2 in fsdp": ("Llama", 8, {"pp": 2, "tp": 2, **FSDP}),
}
"""Family, ranks and strategy of each run that takes the steps of one process. `ddp` does not run with `ep`."""
LOSS, NORM = 1e-5, 5e-5
"""Largest relative differences of a step's loss and gradient norm."""


def accumulation_of(fields: Mapping[str, Any]) -> int:
    """A pipeline runs two micro-batches a stage, others two for FSDP's second pass."""
    return 2 * int(fields.get("pp", 1)) if "pp" in fields else 2


def name_of(cell: Cell) -> str:
    """A cell's family, ranks and fields, as one word."""
    family, ranks, fields = cell
    words = [f"{name}{value}" if isinstance(value, int) else str(value) for name, value in fields.items()]
    return "-".join([family, str(ranks), *words])


def forecast_of(spec: Any, machine: Any, cell: Cell) -> dict[str, Any]:
    """A cell's batch, and the forecast peak of every rank."""
    family, ranks, fields = cell
    began = time.perf_counter()
    for batch in BATCHES:
        config = tk.TrainConfig(
            steps=STEPS,
            micro_batch=batch,
            accumulation=accumulation_of(fields),
            seq_len=int(SIZES[SHAPE]["seq_len"]),
        )
        made = tk.forecast(
            spec,
            tk.Strategy(**fields),
            machine,
            config,
            ranks=ranks,
            one_document=True,
            save=False,
            num_checkpoints=0,
        )
        peaks = [made.peak_bytes] * ranks
        if made.pipeline is not None:
            by_rank = {stage.rank: stage.peak_bytes for stage in made.pipeline.stages}
            each = ranks // len(by_rank)
            peaks = [by_rank[rank // each * each] for rank in range(ranks)]
        if min(peaks) >= LEAST:
            break
    return {
        "name": name_of(cell),
        "family": family,
        "ranks": ranks,
        "fields": fields,
        "accumulation": config.accumulation,
        "micro_batch": config.micro_batch,
        "seq_len": config.seq_len,
        "forecast_peaks": peaks,
        "forecast_phases": dict(made.phases),
        "forecast_commit": commit(),
        "seconds": time.perf_counter() - began,
    }


def finetune(work: Path, out: Path, flags: Mapping[str, Any], ranks: int, workers: Ranks) -> tuple[int, str]:
    """Run the recipe into the folder `out`. Its exit code, and what the ranks have printed."""
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    log = out.with_suffix(".log")
    log.unlink(missing_ok=True)
    words = spell({**flags, "save": False, "save_every": 0, "save_seconds": 0, "run_dir": out})
    code = workers.run(words, ranks, log, distributed=ranks > 1)
    return code, without_places(log.read_text(errors="replace").strip(), work)


def measured(work: Path, row: dict[str, Any], workers: Ranks) -> dict[str, Any]:
    """The same row with what each rank took; where it ended otherwise than well, with its last words."""
    sizes = {name: row[name] for name in ("accumulation", "micro_batch", "seq_len")}
    places = {"model": work / "models" / row["family"], "data": work / "one.jsonl"}
    out = work / "runs" / row["name"]
    code, said = finetune(work, out, {**row["fields"], **sizes, "steps": STEPS, **places}, row["ranks"], workers)
    found = dict(row)
    if code:
        found["failed"] = said[-600:]
    if (out / "memory.json").exists():
        ranks = json.loads((out / "memory.json").read_text())["measured"]["per_rank"]
        found |= {"measured_peaks": [rank["peak_bytes"] for rank in ranks]}
        found |= {"measured_phases": [rank["phases"] for rank in ranks]}
        found |= {"date": about()["date"], "commit": commit()}
    shutil.rmtree(out, ignore_errors=True)
    return found


def errors(row: Mapping[str, Any]) -> list[float]:
    """Forecast over measured, less one, of every rank."""
    return [said / took - 1 for said, took in zip(row["forecast_peaks"], row["measured_peaks"], strict=True)]


def worst(row: Mapping[str, Any]) -> float:
    """The error of the rank with the largest one."""
    return max(errors(row), key=abs)


def groups(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """The rows by every degree, by family, schedule, adapter and precision."""
    degrees = ("tp", "cp", "ep", "pp")
    yield "all", list(rows)
    for name in degrees:
        yield name, [row for row in rows if name in row["fields"]]
    yield "two of these", [row for row in rows if sum(name in row["fields"] for name in degrees) > 1]
    for name in ("pp_schedule", "sharding", "adapter", "precision"):
        default = "1f1b" if name == "pp_schedule" else tk.Strategy.__dataclass_fields__[name].default
        for value in dict.fromkeys(row["fields"].get(name, default) for row in rows):
            some = [row for row in rows if row["fields"].get(name, default) == value]
            yield f"{name} {value}", [row for row in some if name != "pp_schedule" or "pp" in row["fields"]]
    for family in dict.fromkeys(row["family"] for row in rows):
        yield family, [row for row in rows if row["family"] == family]


def tables(rows: Sequence[Mapping[str, Any]], parity: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Errors of all ranks by kind of run, each run's worst rank, what failed, and the steps over a pipeline."""
    good = [row for row in rows if "measured_peaks" in row]
    lines = [
        (name, str(len(some)), *line(name, [each for row in some for each in errors(row)])[1:])
        for name, some in groups(good)
        if some
    ]
    columns = ("of the runs", "runs", "ranks", "median", "95%", "worst", "signed median")
    notes = (
        "Error: forecast / measured - 1 of a rank's allocator peak.",
        "With more ranks than cores gloo's threads may free a collective's tensors late, on some ranks and in some runs.",
    )
    made = [Table(title="Forecast and measured peak of every rank", columns=columns, rows=lines, notes=notes)]
    cells = [
        (row["name"], row["micro_batch"], format_bytes(max(row["measured_peaks"])), f"{100 * worst(row):+.2f}%")
        for row in sorted(good, key=lambda row: -abs(worst(row)))
    ]
    made.append(
        Table(title="Each run", columns=("run", "micro-batch", "fullest rank", "worst rank's error"), rows=cells)
    )
    failed = [
        (row["name"], row.get("refused") or row["failed"][-120:]) for row in rows if {"refused", "failed"} & {*row}
    ]
    if failed:
        made.append(Table(title="Not run, or ended otherwise than well", columns=("run", "why"), rows=failed))
    if parity:
        made.append(
            Table(
                title="The same steps in one process and over ranks",
                columns=("run", "model", "steps", "clipped", "loss", "norm", "the same"),
                rows=[
                    (
                        row["name"],
                        row["family"],
                        row["steps"],
                        row["clipped"],
                        f"{row['loss']:.1e}",
                        f"{row['norm']:.1e}",
                        "yes" if row["same"] else "NO",
                    )
                    for row in parity
                ],
                notes=(
                    "fp32, 4 micro-batches a step, rows with unequal numbers of labels; Qwen3's head is tied. loss, norm: largest "
                    f"relative differences of a step; at most {LOSS:.0e} and {NORM:.0e}.",
                ),
            )
        )
    return made


def uneven_rows(path: Path) -> Path:
    """Prompts and answers of unequal length: each row has another number of labels."""
    rows = [
        {"prompt": "What comes next? " * (1 + number % 5), "completion": "x = y + z; " * (1 + number * 7 % 11)}
        for number in range(400)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parity_runs(
    work: Path, steps: int, workers: Ranks, known: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the largest differences of each run's losses and norms from those of one process over the same rows."""
    alone: dict[str, list[dict[str, Any]]] = {}
    taken = {row["name"]: dict(row) for row in known}
    for name in names:
        family, ranks, fields = PARITY[name]
        if name not in taken:
            trained = {key: value for key, value in fields.items() if key.startswith(("adapter", "lora"))}
            key = f"{family} {trained}"
            if key not in alone:
                alone[key] = parity_steps(work, steps, workers, (family, 1, trained))
            own = parity_steps(work, steps, workers, (family, ranks, fields))
            taken[name] = {"name": name, "family": family, **compared(own, alone[key], steps)}
        yield taken[name]


def parity_steps(work: Path, steps: int, workers: Ranks, cell: Cell) -> list[dict[str, Any]]:
    """Run the recipe over a cell's ranks; return its steps. Each takes 8 rows in 4 micro-batches."""
    family, ranks, fields = cell
    model = checkpoint(work / "models" / f"{family}-parity", family, "parity")
    flags = {"model": model, "data": uneven_rows(work / "uneven.jsonl"), "steps": steps, "packing": False}
    parts = math.prod(int(fields.get(degree, 1)) for degree in ("tp", "cp", "pp"))
    flags |= {"accumulation": 4, "micro_batch": 2 * parts // ranks, "seq_len": 64, "precision": "fp32", "lr": 1e-3}
    out = work / "runs" / "parity"
    code, said = finetune(work, out, {**flags, **fields}, ranks, workers)
    if code:
        raise SystemExit(f"{name_of(cell)} ended with {code}:\n{said[-2000:]}")
    taken = [event for event in read_events(out / "events.jsonl") if "grad_norm" in event]
    shutil.rmtree(out)
    return taken


def compared(own: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Return the largest relative differences of two runs' steps, and whether they are small enough."""
    pairs = list(zip(own, alone, strict=True))
    off = {key: max(abs(one[key] / other[key] - 1) for one, other in pairs) for key in ("loss", "grad_norm")}
    return {
        "steps": len(own),
        "clipped": sum(event["grad_norm"] > 1 for event in own),
        "loss": off["loss"],
        "norm": off["grad_norm"],
        "same": off["loss"] <= LOSS and off["grad_norm"] <= NORM and len(own) == steps,
        "date": about()["date"],
        "commit": commit(),
    }


def before(path: Path) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """What the results hold for these versions and this machine: rows by name, and the runs of parity."""
    found = stored(path)
    rows = {row["name"]: row for row in found.get("runs", []) if "measured_peaks" in row}
    return rows, [row for row in found.get("parity", []) if "family" in row]


def main() -> None:
    """Forecast, run, compare; write the results after each cell."""
    made = parser(__doc__)
    made.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "toolkit-meshes"), help="scratch folder")
    made.add_argument("--only", default="", help="parts of cells' names, with commas; a cell with one of them is run")
    made.add_argument("--again", action="store_true", help="run also what the results hold already")
    made.add_argument("--steps", type=int, default=20, help="of the runs of parity; 0 leaves them out")
    given = parse(made, steps=2)
    work: Path = given.work
    (work / "models").mkdir(parents=True, exist_ok=True)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(file.read_text(errors="replace") for file in sources)[:CHARACTERS]
    (work / "one.jsonl").write_text(json.dumps({"text": text}) + "\n")
    known, parity = before(given.results / "meshes.json")
    cells = [SMOKE] if given.smoke else CELLS
    names = [name_of(cell) for cell in cells]
    chosen = [cell for cell in cells if any(part in name_of(cell) for part in given.only.split(","))]
    random.Random(0).shuffle(chosen)  # a benchmark that is stopped has run some of each kind
    chosen.sort(key=lambda cell: name_of(cell) in known)
    machine, rows = tk.hardware(), dict(known)

    def publish() -> list[Table]:
        some = sorted(rows.values(), key=lambda row: names.index(row["name"]) if row["name"] in names else len(names))
        result = {
            **about(),
            "commit": ", ".join(sorted({row["commit"] for row in (*some, *parity) if "commit" in row})),
        }
        shown = tables(some, parity)
        text = "\n\n".join(map(Table.text, shown))
        write_results(
            given.results,
            "meshes",
            "Forecasts beside real runs over meshes",
            {**result, "runs": some, "parity": parity},
            text,
        )
        return shown

    for cell in chosen:
        name, (family, *_) = name_of(cell), cell
        spec = tk.describe(str(checkpoint(work / "models" / family, family, SHAPE)))
        try:
            row = forecast_of(spec, machine, cell)
            old = {} if given.again else known.get(name, {})
            same = all(row[key] == old.get(key) for key in ("accumulation", "micro_batch", "seq_len"))
            taken = {key: value for key, value in old.items() if key in MEASURED}
            rows[name] = {**row, **taken} if same else measured(work, row, server())
        except ToolkitError as error:
            rows[name] = {
                "name": name,
                "family": family,
                "fields": cell[2],
                "refused": without_places(str(error), work),
            }
        row = rows[name]
        said = f"{100 * worst(row):+.2f}%" if "measured_peaks" in row else row.get("refused") or row["failed"][-200:]
        print(name, said, flush=True)
        publish()
    compared_runs = list(PARITY)[: 1 if given.smoke else None] if given.steps else []
    for row in parity_runs(work, given.steps, server(), [] if given.again else parity, compared_runs):
        parity = [each for each in parity if each["name"] != row["name"]] + [row]
        publish()
    shown = publish()
    print("\n\n".join(map(Table.text, shown)))
    if not all(row["same"] for row in parity):
        raise SystemExit("the steps over ranks differ from those of one process")


if __name__ == "__main__":
    main()
