"""What one GPU shows: memory by phase against the forecast, speed against the forecast, and MFU, of runs of the recipe.

    python benchmarks/gpu.py --minutes 9 --out gpu     # on a machine with a GPU: results into gpu/gpu-CARD.json and .md
    python benchmarks/gpu.py --dry-run                 # on a CPU: the same with tiny models, without the CUDA calls
    python benchmarks/gpu.py --smoke                   # the same as --dry-run, into a temporary folder
    python benchmarks/gpu.py --forecast                # on any machine: stored runs beside the forecasts of today's code

It needs the toolkit, torch and transformers. DeepSpeed, PEFT and bitsandbytes add runs; what is missing is listed. All that
touches the GPU runs in a process of its own, so that nothing else holds its memory. The results are written after each run. A
second call with the same --out goes on where the first stopped, and runs those of an older commit again where time is left.

Operations of a step are those that it needs: all products of the forward and of the gradients of inputs, products of the
gradients of trained weights alone, attention of each token to itself and to those before it in its document, and no
recomputation. MFU divides them by the time and the data sheet's peak. Every second timed run calibrates the time that the
forecast gives (their median ratio). The errors are those of the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_calls
from machine import about, parse, parser, write_results

import toolkit as tk
from toolkit.config.flags import spell
from toolkit.core.display import Table
from toolkit.core.phases import PHASES
from toolkit.core.units import format_bytes
from toolkit.data.rows import find_rows
from toolkit.devices.gpu_catalog import CARDS
from toolkit.models import ModelSpec

STEPS, WARM = 8, 3
"""Steps of a run, and those before the timed ones."""

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
SHAPES = {
    "0.6B": {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True, "max_position_embeddings": 40_960,
    },
    "8B": {
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 8192,
    },
}  # fmt: skip
"""Shapes of Qwen3-0.6B and Llama-3-8B; weights are drawn."""

CHOSEN = ("attention", "loss", "activation_checkpointing")
"""Fields of a strategy that a run chooses where they are `auto`."""

LIBRARIES = {"zero2": ("deepspeed",), "zero3": ("deepspeed",), "lora": ("peft",), "qlora": ("peft", "bitsandbytes")}
"""What a sharding or an adapter needs, besides what reads the data."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: a model's shape, documents of a row, and the fields of Strategy and TrainConfig that differ from the default."""

    shape: str
    documents: str
    """`one` or `several` in a row."""
    strategy: Mapping[str, str | bool]
    train: Mapping[str, int]

    @property
    def name(self) -> str:
        """The run's name, and its row in the results."""
        words = [name if value is True else value for name, value in self.strategy.items()]
        return "-".join(map(str, (self.shape, self.documents, *words, *self.train.values())))

    @property
    def missing(self) -> str | None:
        """A library that it needs and that is not installed."""
        needed = ("pyarrow", *(library for word in self.strategy.values() for library in LIBRARIES.get(str(word), ())))
        return next((library for library in needed if importlib.util.find_spec(library) is None), None)


def cells() -> list[Cell]:
    """Return the grid, the runs that tell most first."""
    small, long = {"micro_batch": 4, "seq_len": 2048}, {"micro_batch": 1, "seq_len": 8192}
    none: dict[str, str | bool] = {"activation_checkpointing": "none"}
    fast: dict[str, str | bool] = {"precision": "bf16", **none, "loss": "chunked", "compile": True}
    grid: list[tuple[str, str, dict[str, str | bool], dict[str, int]]] = [
        ("0.6B", "one", {"precision": "bf16"}, small),
        ("8B", "one", {"precision": "bf16", "adapter": "lora"}, {"micro_batch": 2, "seq_len": 4096, "accumulation": 4}),
        ("0.6B", "several", {"precision": "bf16"}, small),
        ("0.6B", "one", {"precision": "bf16", **none}, small),
        ("8B", "one", {"precision": "bf16_pure"}, {"micro_batch": 1, "seq_len": 4096}),
        ("0.6B", "one", {"precision": "bf16", **none, "loss": "chunked"}, small),
        ("0.6B", "one", fast, small),
        ("0.6B", "several", fast, small),
        ("0.6B", "one", {"precision": "bf16", "activation_checkpointing": "selective", "loss": "chunked"}, small),
        ("0.6B", "one", {"precision": "bf16", "activation_checkpointing": "attention"}, small),
        ("0.6B", "one", {"precision": "bf16_pure"}, small),
        ("0.6B", "one", {"precision": "fp16"}, small),
        ("0.6B", "one", {"precision": "fp32"}, {"micro_batch": 2, "seq_len": 1024}),
        ("0.6B", "one", {"precision": "bf16"}, long),
        ("0.6B", "several", {"precision": "bf16"}, long),
        ("0.6B", "one", {"precision": "bf16", "attention": "eager"}, {"micro_batch": 4, "seq_len": 1024}),
        ("8B", "one", {"precision": "bf16", "adapter": "qlora"}, {"micro_batch": 2, "seq_len": 2048}),
        ("0.6B", "one", {"precision": "bf16", "sharding": "zero2", "offload": "optimizer"}, small),
        ("0.6B", "one", {"precision": "bf16", "sharding": "zero3", "offload": "cpu"}, small),
        ("0.6B", "one", {"precision": "bf16", "sharding": "fsdp", "offload": "cpu"}, small),
        ("0.6B", "one", {"precision": "bf16", "adapter": "lora"}, small),
        ("0.6B", "one", {"precision": "bf16", "adapter": "qlora"}, small),
    ]
    return [Cell(shape=shape, documents=kind, strategy=strategy, train=train) for shape, kind, strategy, train in grid]


def dry_cells() -> list[Cell]:
    """Return runs of the tiny model that a CPU can do, enough for a calibration and an error."""
    fp32, bf16 = {"precision": "fp32"}, {"precision": "bf16", "activation_checkpointing": "none"}
    return [
        Cell(shape="tiny", documents="one", strategy=fp32, train={"micro_batch": 2, "seq_len": 64}),
        Cell(
            shape="tiny", documents="several", strategy=bf16, train={"micro_batch": 4, "seq_len": 64, "accumulation": 2}
        ),
    ]


def run_in_process(end: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a process that ends with it, and with it its memory on the GPU.

    Raises:
        multiprocessing.TimeoutError: at `end`, a value of `time.monotonic()`.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(function, arguments).get(max(0.0, end - time.monotonic()))


def model_folder(work: Path, shape: str, end: float) -> Path:
    """Return the folder of a model of this shape; its weights are drawn on the GPU, or on the CPU in a dry run."""
    folder = work / "models" / shape
    if not (folder / "tokenizer.json").exists():
        from transformers import AutoConfig

        from toolkit.data import embedded_tokenizer
        from toolkit.training.preflight import random_model

        shutil.rmtree(folder, ignore_errors=True)
        if shape == "tiny":
            random_model(folder, AutoConfig.for_model("llama", vocab_size=4096, num_key_value_heads=2, **TINY))
        else:
            run_in_process(end, gpu_calls.draw_model, folder, AutoConfig.for_model(**SHAPES[shape]))
            embedded_tokenizer(folder)
    return folder


def texts(work: Path, documents: str) -> Path:
    """Write the standard library's sources as documents of about 60 tokens, or as completions, which are cut to one row each."""
    import sysconfig

    path = work / f"{documents}.jsonl"
    if not path.exists():
        sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = "".join(source.read_text(errors="replace") for source in sources)[:4_000_000]
        size = {"one": 50_000, "several": 200}[documents]
        parts = [text[start : start + size] for start in range(0, len(text) - size, size)]
        lines = [{"prompt": "Python:", "completion": part} if documents == "one" else {"text": part} for part in parts]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def attended(data: Mapping[str, Any]) -> float:
    """Return the pairs of a token and one that it attends to, in a row of a run's data."""
    rows = find_rows(data["fingerprint"])
    assert rows is not None, "the run has just read them"
    return float((rows.columns["position_ids"] + 1).sum(dtype="int64")) / rows.count


def needed_operations(spec: ModelSpec, tokens: int, pairs: float, adapter: int) -> float:
    """Return the floating-point operations that one row of a step needs (see the module's docstring).

    Args:
        spec: a decoder with attention in every layer.
        tokens: of the row.
        pairs: of tokens that attend to each other, from `attended`.
        adapter: elements of the adapter, which alone is trained; 0 without one.
    """
    matrices = sum(parameter.elements for parameter in spec.parameters if len(parameter.shape) == 2)
    looked_up = 0 if spec.tied else spec.vocab * spec.hidden  # an embedding is no product, unless it is the head, too
    products = matrices - looked_up + adapter
    linear = 2 * tokens * (2 * products + (adapter or products))  # forward, gradients of inputs, of trained weights
    width: int = spec.config["num_attention_heads"] * spec.config["head_dim"]
    return linear + 3 * 4 * pairs * width * spec.layers  # 2 products of 2 operations, 3 times


PROGRAM = f"""
from toolkit.core.process_lifecycle import die_with_parent
die_with_parent({os.getpid()})
from toolkit.cli import main
raise SystemExit(main())
"""
"""`toolkit`, in a process that leaves the GPU when this one is killed."""


def run_cell(cell: Cell, work: Path, end: float) -> dict[str, Any]:
    """Run a cell in a process of its own until `end`, a value of `time.monotonic()`; return its row."""
    row: dict[str, Any] = {"name": cell.name, "commit": about()["commit"], **dataclasses.asdict(cell)}
    if cell.missing:
        return {**row, "missing": cell.missing}
    out = work / "runs" / cell.name
    shutil.rmtree(out, ignore_errors=True)
    request = {**cell.strategy, **cell.train, "steps": STEPS, "data": texts(work, cell.documents)}
    began = time.monotonic()
    try:
        folder = model_folder(work, cell.shape, end)
        flags = spell({**request, "model": folder, "save_seconds": 0.0, "save": False, "run_dir": out, "processes": 1})
        command = [sys.executable, "-c", PROGRAM, "train", *flags]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=end - time.monotonic())
        row["wall_seconds"] = time.monotonic() - began
        if ended.returncode:
            row["failed"] = (ended.stderr + ended.stdout).replace(str(work), "").strip()[-600:]
        else:
            row |= figures(cell, folder, out)
    except (multiprocessing.TimeoutError, subprocess.TimeoutExpired):
        row["stopped"] = True
    except (RuntimeError, OSError, tk.ToolkitError) as error:  # the others may run
        row["failed"] = str(error)
    shutil.rmtree(out, ignore_errors=True)
    return row


def figures(cell: Cell, folder: Path, out: Path) -> dict[str, Any]:
    """Return a finished run's memory and speed, measured and forecast; without a forecast, the reason."""
    from toolkit.run_folder.run_json import open_finished_run

    with open_finished_run(out) as (record, memory, steps):
        rank, expected = memory["measured"]["per_rank"][0], memory["forecast"]
        seconds = statistics.median(step["seconds"] for step in steps[WARM:])
        spec = tk.describe(str(folder))
        adapter = lora_elements(spec) if "adapter" in cell.strategy else 0
        rows = cell.train["micro_batch"] * cell.train.get("accumulation", 1)
        operations = rows * needed_operations(spec, cell.train["seq_len"], attended(record["data"]), adapter)
        card = tk.hardware().device.card
        half = cell.strategy["precision"] != "fp32"
        peak = (card.tflops_half if half else card.tflops_fp32) * 1e12 if card else None
        result = {
            **{name: record["strategy"][name] for name in CHOSEN},
            "measured_phases": rank["phases"],
            "peak_bytes": rank["peak_bytes"],
            "reserved_bytes": rank["reserved_bytes"],
            "device_bytes": rank["device_bytes"],
            "step_seconds": seconds,
            "needed_operations": operations,
            "tokens_per_second": rows * cell.train["seq_len"] / seconds,
            "tflops": operations / seconds / 1e12,
            "mfu": operations / seconds / peak if peak else None,
        }
        return {**result, **(forecast_figures(expected) if expected else {"unforecast": memory["unforecast"]})}


def forecast_figures(expected: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is compared of a forecast."""
    return {
        "forecast_phases": expected["device"]["phases"],
        "forecast_needed_bytes": expected["device"]["needed_bytes"],
        "forecast_seconds": expected["step_seconds"],
        "forecast_operations": expected["operations"],
    }


def forecast_of(row: Mapping[str, Any], card: str) -> dict[str, Any]:
    """Return the figures of a stored run's forecast with today's code."""
    from transformers import AutoConfig

    spec = tk.describe(AutoConfig.for_model(**SHAPES[row["shape"]]))
    took = {name: row[name] for name in CHOSEN if name in row}
    strategy = tk.Strategy(**{"loss": "whole", **row["strategy"], **took})
    train_config = tk.TrainConfig(**row["train"])
    one = row["documents"] == "one"
    expected = tk.forecast(spec, strategy, card, train_config, one_document=one, save=False, num_checkpoints=0)
    return forecast_figures(expected.to_dict())


def without_places(result: dict[str, Any]) -> dict[str, Any]:
    """Return results without the folders of this machine, which doctor names."""
    places = {str(Path.cwd()): ".", str(Path.home()): "~", sys.executable: "python"}
    text = json.dumps(result)
    for place, name in places.items():
        text = text.replace(place, name)
    found: dict[str, Any] = json.loads(text)
    return found


def forecast_again(path: Path) -> None:
    """Make the forecasts of stored runs again, with today's code, for the card that they ran on."""
    result = without_places(json.loads(path.read_text()))
    for row in result["runs"]:
        if "measured_phases" in row:
            row.pop("unforecast", None)
            row |= forecast_of(row, path.stem.removeprefix("gpu-"))
    result |= {"timing": time_errors(result["runs"]), "forecasts_of_commit": about()["commit"]}
    shown = "\n\n".join(table.text() for table in tables(result["runs"], result["timing"]))
    write_results(
        path.parent, path.stem, "Runs on one GPU", result, f"forecasts: commit {about()['commit']}\n\n{shown}"
    )


def lora_elements(spec: ModelSpec) -> int:
    """Return the elements of the default adapter: of all linear modules."""
    rank = tk.Strategy().lora_rank
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters}
    return sum(rank * sum(shapes[f"{name}.weight"]) for name in spec.linears)


def time_errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Calibrate by every second timed run; return the factor and the relative errors of the others.

    Where the catalog does not know the device, the forecast's time is its operations, and the factor seconds for one.
    """
    timed = [row for row in rows if "forecast_operations" in row]
    known = all(row["forecast_seconds"] for row in timed)
    expected = {row["name"]: row["forecast_seconds"] if known else row["forecast_operations"] for row in timed}
    ratios = [row["step_seconds"] / expected[row["name"]] for row in timed]
    if len(ratios) < 2:
        return {}
    factor = statistics.median(ratios[::2])
    errors = {row["name"]: factor * expected[row["name"]] / row["step_seconds"] - 1 for row in timed[1::2]}
    return {"factor": factor, "from": "seconds" if known else "operations", "errors": errors}


def tables(rows: Sequence[Mapping[str, Any]], timing: Mapping[str, Any]) -> list[Table]:
    """Return memory by phase, speed, and what did not run."""
    done = [row for row in rows if "measured_phases" in row]
    memory = []
    for row in done:
        expected_phases = row.get("forecast_phases", {})
        pairs = [(expected_phases.get(phase), row["measured_phases"].get(phase)) for phase in PHASES[:-1]]
        pairs.append((row.get("forecast_needed_bytes"), row["device_bytes"]))
        ratios = [f"{expected / took:.2f}" if expected and took else "–" for expected, took in pairs]
        bytes_ = (row["peak_bytes"], row["reserved_bytes"], row["device_bytes"])
        memory.append((row["name"], *ratios, *(format_bytes(size) if size else "–" for size in bytes_)))
    speed = [
        (
            row["name"], f"{row['step_seconds']:.3f}",
            f"{row['forecast_seconds']:.3f}" if row.get("forecast_seconds") else "–",
            f"{row['tokens_per_second']:,.0f}", f"{row['tflops']:.1f}", f"{row['mfu']:.1%}" if row["mfu"] else "–",
        )
        for row in done
    ]  # fmt: skip
    errors = sorted(map(abs, timing.get("errors", {}).values()))
    note = (
        f"Calibrated by {timing['from']}: {statistics.median(errors):.1%} off (median), {errors[-1]:.1%} (worst)."
        if errors
        else ""
    )
    phases = [f"{phase} x" for phase in (*PHASES[:-1], "device")]
    found = [
        Table(
            title="Memory: forecast / measured of each phase and of the whole device, and the highest",
            columns=("run", *phases, "allocated", "reserved", "device"),
            rows=memory,
        ),
        Table(
            title="Speed",
            columns=("run", "step s", "forecast s", "tokens/s", "TFLOP/s", "MFU"),
            rows=speed,
            notes=(note,) if note else (),
        ),
    ]
    without = [
        (row["name"], row.get("missing") or row.get("unforecast") or row.get("failed", "stopped: no time left")[-200:])
        for row in rows
        if "unforecast" in row or row not in done
    ]
    if without:
        found.append(Table(title="Without a result, or a forecast", columns=("run", "why"), rows=without))
    return found


def stored(path: Path) -> dict[str, Any]:
    """Return an earlier call's results with the same versions on the same card; what had no time or failed is left out."""
    if not path.exists():
        return {}
    result: dict[str, Any] = json.loads(path.read_text())
    if result["versions"] != about()["versions"]:
        return {}
    runs = [
        {"commit": result["commit"], **row} for row in result["runs"] if "measured_phases" in row or "missing" in row
    ]
    return {**result, "runs": runs}


def _commit_of(rows: Mapping[str, Mapping[str, Any]], cell: Cell) -> str | None:
    return rows[cell.name]["commit"] if cell.name in rows else None


def main() -> None:
    """Run the cells that the time allows, write after each, and print the tables."""
    flags = parser(__doc__)
    flags.add_argument("--minutes", type=float, default=9.0, help="stop in this time (default: %(default)s)")
    flags.add_argument("--out", type=Path, help="folder of results and models (default: that of the results)")
    flags.add_argument("--dry-run", action="store_true", help="tiny models on a CPU, without the CUDA calls")
    flags.add_argument("--forecast", action="store_true", help="only make the forecasts of stored results again")
    arguments = parse(flags, dry_run=True)
    if arguments.forecast:
        for path in (arguments.out or arguments.results).glob("gpu-*.json"):
            if path.stem.removeprefix("gpu-") in CARDS:
                forecast_again(path)
        return
    end = time.monotonic() + 60 * arguments.minutes
    out = arguments.out or arguments.results
    machine = tk.hardware()
    if not arguments.dry_run and machine.device.kind != "cuda":
        raise SystemExit("No GPU that torch can use was found. Try --dry-run, or run `toolkit doctor` for the reason.")
    name = "gpu-dry-run" if arguments.dry_run else f"gpu-{machine.device.key or machine.device.name.replace(' ', '-')}"
    if not out.exists():
        out.mkdir(parents=True)
        (out / ".gitignore").write_text("*\n")  # as a new file it would make the commit another one in the next call
    work = out / "gpu-work"
    work.mkdir(exist_ok=True)
    before = stored(out / f"{name}.json")
    doctor = tk.diagnose()
    print(doctor)
    facts = before.get("facts")
    with contextlib.suppress(multiprocessing.TimeoutError):
        facts = facts or run_in_process(end, dict if arguments.dry_run else gpu_calls.facts)
    print(json.dumps(facts, indent=2))
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in before.get("runs", [])}
    commit, longest = about()["commit"], max((row.get("wall_seconds", 0.0) for row in rows.values()), default=0.0)
    grid = [cell for cell in (dry_cells() if arguments.dry_run else cells()) if commit != _commit_of(rows, cell)]
    for cell in sorted(grid, key=lambda cell: cell.name in rows):
        if end - time.monotonic() < longest / 2:
            print(f"no time left: {cell.name}")
            continue
        row = run_cell(cell, work, end)
        longest = max(longest, row.get("wall_seconds", 0.0))
        if "stopped" in row and cell.name in rows:
            continue
        rows[cell.name] = row
        runs = list(rows.values())
        timing = time_errors(runs)
        shown = "\n\n".join(table.text() for table in tables(runs, timing))
        result = without_places({**about(), "doctor": doctor.to_dict(), "facts": facts, "runs": runs, "timing": timing})
        write_results(out, name, "Runs on one GPU", result, shown)
        print(shown, flush=True)
    shutil.rmtree(work / "runs", ignore_errors=True)
    if arguments.dry_run:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
