"""What `tk.forecast` says beside what real runs take: the allocator's peak of the fullest rank, over a grid of strategies.

    python benchmarks/forecast_accuracy.py                  # 300 runs; on two cores about two hours
    python benchmarks/forecast_accuracy.py --runs 400       # those that the results hold are not run again
    python benchmarks/forecast_accuracy.py --recent --runs 28  # families of 2024 to 2026, results of their own
    python benchmarks/forecast_accuracy.py --adapters qlora8   # the same
    python benchmarks/forecast_accuracy.py --shardings zero1,hsdp --runs 4   # of these alone
    python benchmarks/forecast_accuracy.py --smoke          # whether it still runs: one run of one family

Each run is the recipe, `toolkit.finetune`, for three steps over a model of random weights, in real processes. Its forecast
is made before, in a process that trains nothing; its batch is the smallest with a forecast over 110 MiB. What the grid
holds and no engine can do is refused before, and counted by its reason. Every run counts: one that fails is listed.

It also lists the estimates of accelerate (`accelerate estimate-memory`) and DeepSpeed (`estimate_zero*_model_states_mem_needs`).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Semaphore
from typing import Any

from families import AXES, FAMILIES, RECENT, SHAPES, STEPS, VOCABULARY, Case, checkpoint, config_of, possible, spread
from forking import Ranks, server
from machine import NO_COMMIT, about, commit, parse, parser, stored, write_results

from toolkit.config.flags import spell
from toolkit.core.display import Table
from toolkit.core.phases import PHASES
from toolkit.core.units import MiB, format_bytes
from toolkit.models import describe

LEAST = 110 * MiB
"""Of a forecast: with some room for a peak of at least 100 MiB."""

BATCHES = (2, 3, 4, 6, 8, 12, 16, 24)

SMOKE = {"family": "Llama", "shape": "wide", "sharding": "fsdp", "adapter": "none", "ranks": 2}
"""Cases of which a smoke test draws one."""

ADAPTERS = "none,lora,qlora"

ANSWER = "ANSWER "

SAVED = 10
"""Runs after which the results are written again."""

CORES, AHEAD = 2, 50
"""Runs of one rank at a time, and forecasts that may be made ahead of them."""

DOCUMENTS = {"one": 4_000_000, "several": 200}
"""Characters of a document: longer than all that is drawn, or about 60 tokens."""


def texts(folder: Path, kind: str) -> Path:
    """The standard library's sources in documents of one length, as JSONL."""
    import sysconfig

    path = folder / f"{kind}.jsonl"
    if not path.exists():
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        whole = "".join(file.read_text(errors="replace") for file in files)
        size = DOCUMENTS[kind]
        whole = whole[:2_000_000]
        lines = [json.dumps({"text": whole[at : at + size]}) for at in range(0, len(whole), size)]
        path.write_text("\n".join(lines) + "\n")
    return path


def specs(work: Path, pairs: Collection[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """Describe these models; create those that are missing, with random weights."""
    return {pair: describe(str(checkpoint(work / "models" / "-".join(pair), *pair))) for pair in pairs}


def forecasts(work: Path, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Of each case: its batch, what is forecast, and how long that took."""
    import peft  # noqa: F401 - so that adapters are traced here, and not in a child process each

    import toolkit as tk

    machine, known = tk.hardware(), specs(work, {(case.family, case.shape) for case in cases})
    for case in cases:
        began = time.perf_counter()
        for batch in BATCHES:
            made = tk.forecast(
                known[case.family, case.shape],
                case.strategy(),
                machine,
                case.train_config(batch),
                ranks=case.ranks,
                one_document=case.documents == "one",
            )
            if made.peak_bytes >= LEAST:
                break
        yield {
            **asked(case),
            "seq_len": made.train_config.seq_len,
            "micro_batch": made.train_config.micro_batch,
            "forecast_peak_bytes": made.peak_bytes,
            "forecast_phases": dict(made.phases),
            "forecast_parts": dict(made.parts),
            "seconds": time.perf_counter() - began,
            "estimates": estimates(case, known[case.family, case.shape].elements),
        }


def asked(case: Case) -> dict[str, Any]:
    """A case as a row of the results begins."""
    return {
        "family": case.family,
        "shape": case.shape,
        "config": {"vocab_size": VOCABULARY, **SHAPES[case.shape]},
        "strategy": dataclasses.asdict(case.strategy()),
        "ranks": case.ranks,
        "documents": case.documents,
        "accumulation": case.accumulation,
    }


def value(row: Mapping[str, Any], axis: str) -> Any:
    """Of a row, what it is on one of the axes."""
    return row["strategy"][axis] if axis in row["strategy"] else row[axis]


def name_of(row: Mapping[str, Any]) -> str:
    """A row's place on every axis, and its batch: no two runs of one name differ."""
    return "-".join(str(value(row, axis)) for axis in (*AXES, "micro_batch"))


def without_places(text: str, work: Path) -> str:
    """Without where this machine keeps its libraries and the runs."""
    return text.replace(f"{sys.prefix}/", "").replace(f"{work}/", "")


def measured(work: Path, row: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """The same row with what the run took; where it ended otherwise than well, with its last words."""
    out = work / "runs" / name_of(row)
    flags = {axis: row["strategy"][axis] for axis in AXES if axis in row["strategy"]}
    flags["dp_replicate"] = row["strategy"]["dp_replicate"]
    flags |= {
        "steps": STEPS,
        "accumulation": row["accumulation"],
        "micro_batch": row["micro_batch"],
        "seq_len": row["seq_len"],
    }
    flags |= {"model": work / "models" / f"{row['family']}-{row['shape']}", "run_dir": out}
    flags |= {"data": texts(work, row["documents"])}
    shutil.rmtree(out, ignore_errors=True)
    log = out.with_suffix(".log")
    log.unlink(missing_ok=True)
    out.parent.mkdir(exist_ok=True)
    code = ranks.run(spell(flags), row["ranks"], log, distributed=row["strategy"]["sharding"] != "none")
    found = dict(row)
    if code:
        found["failed"] = without_places(log.read_text().strip(), work)[-600:]
    if (out / "memory.json").exists():
        took = json.loads((out / "memory.json").read_text())["measured"]
        found |= {"measured_peak_bytes": took["peak_bytes"], "measured_phases": took["phases"]}
        found |= {"date": about()["date"], "commit": commit()}
    shutil.rmtree(out, ignore_errors=True)
    return found


def others(rows: Sequence[Mapping[str, Any]], known: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Measured before and not among these."""
    done = {name_of(row) for row in rows}
    return [row for name, row in known.items() if name not in done]


def measured_before(path: Path) -> dict[str, dict[str, Any]]:
    """Runs of the results that lie there, where versions and machine are the same; `--again` measures them again."""
    return {name_of(row): row for row in stored(path).get("runs", []) if "measured_peak_bytes" in row}


def all_measured(
    work: Path, rows: Iterator[dict[str, Any]], known: Mapping[str, dict[str, Any]], count: int
) -> Iterator[dict[str, Any]]:
    """Two runs at a time where each is of one rank, so that no core waits: timings are no part of this.

    `count`: of the servers that fork them.
    """
    for kind in DOCUMENTS:
        texts(work, kind)
    servers: SimpleQueue[Ranks] = SimpleQueue()
    slots, turn = Semaphore(CORES), Lock()
    more = [Ranks() for _ in range(count - 1)]
    for ranks in (server(), *more):
        servers.put(ranks)

    def one(row: dict[str, Any]) -> dict[str, Any]:
        if name_of(row) in known:
            kept = ("measured_peak_bytes", "measured_phases", "date", "commit", "failed")
            return {**row, **{key: found for key, found in known[name_of(row)].items() if key in kept}}
        wanted = min(row["ranks"], CORES)
        with turn:  # who came first waits first
            for _ in range(wanted):
                slots.acquire()
        server = servers.get()
        try:
            return measured(work, row, server)
        finally:
            servers.put(server)
            slots.release(wanted)

    with ThreadPoolExecutor(CORES) as pool:
        waiting: list[Future[dict[str, Any]]] = []
        for row in rows:
            waiting.append(pool.submit(one, row))
            while waiting and (waiting[0].done() or len(waiting) > AHEAD):
                yield waiting.pop(0).result()
        for made in waiting:
            yield made.result()
    for ranks in more:
        ranks.close()


def estimates(case: Case, count: int) -> dict[str, float]:
    """What other estimators say of a run's device, in bytes, where they speak of its strategy at all."""
    from accelerate.commands.estimate import estimate_training_usage
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    if case.adapter != "none":
        return {}
    if case.sharding in ("none", "ddp"):
        dtype = "float32" if case.precision == "fp32" else "bfloat16"
        return {"accelerate": max(estimate_training_usage(4 * count, dtype).values())}
    if case.sharding == "zero2":
        return {
            "deepspeed": estimate_zero2_model_states_mem_needs(count, num_gpus_per_node=case.ranks, cpu_offload=False)[
                1
            ]
        }
    if case.sharding == "zero3":
        largest = int(SHAPES[case.shape]["hidden"]) * VOCABULARY
        return {
            "deepspeed": estimate_zero3_model_states_mem_needs(
                count, largest, num_gpus_per_node=case.ranks, cpu_offload=False, cpu_offload_params=False
            )[1]
        }
    return {}


def errors(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Forecast over measured, less one, of every run."""
    return [row["forecast_peak_bytes"] / row["measured_peak_bytes"] - 1 for row in rows]


def percent(row: Mapping[str, Any]) -> str:
    """A row's error, signed."""
    return f"{100 * errors([row])[0]:+.2f}%"


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all are at most."""
    return sorted(values)[max(0, -(-int(share * 1000) * len(values) // 1000) - 1)]


def line(name: str, found: Sequence[float]) -> tuple[str, ...]:
    """A row of the table."""
    sizes = [abs(one) for one in found]
    shown = (statistics.median(sizes), quantile(sizes, 0.95), max(sizes), statistics.median(found))
    return (name, str(len(found)), *(f"{100 * one:.2f}%" for one in shown))


def limits(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """How `fits` does at limits near the truth."""
    pairs = [(row["forecast_peak_bytes"], row["measured_peak_bytes"]) for row in rows]
    exceeded = sum(took > said / 0.95 for said, took in pairs)
    wrongly = sum(said <= 0.95 * took for said, took in pairs)
    refused = sum(said > 1.05 * took for said, took in pairs)
    return (
        f"At a limit of forecast / 0.95 the run exceeds it {exceeded} times in {len(pairs)}.",
        f"At 0.95 of what it took `fits` says yes {wrongly} times; at 1.05 of it, no {refused} times.",
    )


def tables(rows: Sequence[Mapping[str, Any]], refused: Mapping[str, int], seed: int) -> list[Table]:
    """All runs, by every value of every axis, by phase; other estimators; what failed."""
    good = [row for row in rows if "measured_peak_bytes" in row]
    lines = [line("all", errors(good))]
    for axis, values in AXES.items():
        for one in values:
            some = [row for row in good if value(row, axis) == one]
            if some:
                lines.append(line(f"{axis} {one}", errors(some)))
    columns = ("of the runs", "runs", "median", "95%", "worst", "signed median")
    took = [row["seconds"] for row in good]
    notes = (
        f"Error: forecast / measured - 1 of the fullest rank's allocator peak. Seed {seed}.",
        *limits(good),
        f"A forecast took {statistics.median(took):.2f} s (median), traces included that no earlier one had made.",
    )
    found = [Table(title="Forecast and measured peak", columns=columns, rows=lines, notes=notes)]
    found.append(Table(title="By phase", columns=columns, rows=list(_by_phase(good))))
    found.append(Table(title="Other estimators, on the same runs", columns=columns, rows=list(_others(good))))
    reasons = [(reason, str(count)) for reason, count in Counter(refused).most_common()]
    found.append(Table(title="Not possible, of the whole grid", columns=("reason", "cases"), rows=reasons))
    worst = sorted(good, key=lambda row: abs(errors([row])[0]), reverse=True)[:10]
    pairs = [
        (name_of(row), format_bytes(row["forecast_peak_bytes"]), format_bytes(row["measured_peak_bytes"]), percent(row))
        for row in worst
    ]
    found.append(Table(title="The worst ten", columns=("run", "forecast", "measured", "error"), rows=pairs))
    failed = [
        (name_of(row), str("measured_peak_bytes" in row), row["failed"][-120:]) for row in rows if "failed" in row
    ]
    if failed:
        found.append(Table(title="Ended otherwise than well", columns=("run", "measured", "last words"), rows=failed))
    return found


def _by_phase(rows: Sequence[Mapping[str, Any]]) -> Any:
    for phase in PHASES:
        pairs = [(row["forecast_phases"].get(phase), row["measured_phases"].get(phase)) for row in rows]
        if ratios := [said / took - 1 for said, took in pairs if said and took]:
            yield line(phase, ratios)


def _others(rows: Sequence[Mapping[str, Any]]) -> Any:
    for name in ("accelerate", "deepspeed"):
        some = [row for row in rows if name in row["estimates"]]
        if some:
            yield line(name, [row["estimates"][name] / row["measured_peak_bytes"] - 1 for row in some])
            yield line("this forecast, of these", errors(some))


def apart(work: Path, asked: Any) -> Iterator[Any]:
    """The forecasts, from a process of their own, each as soon as it is there."""
    command = [sys.executable, __file__, "--forecast", "--work", str(work)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asked))
        process.stdin.close()
        for line in process.stdout:
            if line.startswith(ANSWER):
                yield json.loads(line.removeprefix(ANSWER))
    if process.returncode:
        raise SystemExit(f"the process that forecasts ended with {process.returncode}")


def main() -> None:
    """Draw, forecast, run, and compare."""
    made = parser(__doc__)
    made.add_argument("--runs", type=int, default=300)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "toolkit-truth"), help="scratch folder")
    made.add_argument("--only", default="", help="parts of cases' names, such as zero3-lora,hsdp")
    made.add_argument("--recent", action="store_true", help="the families of 2024 to 2026")
    made.add_argument("--adapters", default=ADAPTERS, help="(default: %(default)s)")
    made.add_argument("--shardings", default=",".join(AXES["sharding"]), help="(default: all)")
    made.add_argument("--again", action="store_true", help="measure also what the results hold already")
    made.add_argument("--forecast", action="store_true", help=argparse.SUPPRESS)
    arguments = parse(made, runs=1)
    work = arguments.work
    if arguments.forecast:
        cases = [Case(**one) for one in json.load(sys.stdin)]
        for answer in forecasts(work, cases):
            print(ANSWER + json.dumps(answer), flush=True)
        return
    work.mkdir(parents=True, exist_ok=True)
    families = RECENT if arguments.recent else FAMILIES
    parts = [part.strip() for part in arguments.only.split(",")]
    if all(any(name in part for name in families) for part in parts):
        families = {name: of for name, of in families.items() if any(name in part for part in parts)}
    pairs = itertools.product((str(SMOKE["family"]),) if arguments.smoke else families, SHAPES)
    able, refused = possible({pair: describe(config_of(*pair)) for pair in pairs}, arguments.adapters.split(","))
    able = [case for case in able if case.sharding in arguments.shardings.split(",")]
    if arguments.smoke:
        able = [case for case in able if SMOKE.items() <= dataclasses.asdict(case).items()]
    names = {"-".join(map(str, dataclasses.asdict(case).values())): case for case in able}
    if missing := [part for part in parts if not any(part in name for name in names)]:
        raise SystemExit(f"--only {', '.join(missing)}: no case of the grid has that in its name.")
    able = [case for name, case in names.items() if any(part in name for part in parts)]
    chosen = [dataclasses.asdict(case) for case in spread(able, arguments.runs, arguments.seed)]
    name = "forecast_accuracy" + ("_recent" if arguments.recent else "")
    name += f"_{arguments.adapters}" if arguments.adapters != ADAPTERS else ""
    rows, known = [], measured_before(arguments.results / f"{name}.json")
    taken = {} if arguments.again else known
    specs(work, {(case["family"], case["shape"]) for case in chosen})  # not in the process that times its forecasts
    servers = max(1, min(CORES, sum(case["ranks"] == 1 for case in chosen)))  # runs of several ranks go one at a time
    for number, row in enumerate(all_measured(work, apart(work, chosen), taken, servers), start=1):
        rows.append(row)
        said = percent(row) if "measured_peak_bytes" in row else row["failed"][-200:]
        print(number, name_of(row), said, flush=True)
        if number % SAVED == 0 or number == len(chosen):
            runs = [*rows, *others(rows, known)]
            shown = tables(runs, refused, arguments.seed)
            measured_at = ", ".join(sorted({row.get("commit", NO_COMMIT) for row in runs}))
            found = {**about(), "commit": measured_at, "forecast_commit": commit(), "seed": arguments.seed}
            found |= {"refused": refused, "runs": runs}
            text = "\n\n".join([f"Forecasts at commit {commit()}", *map(Table.text, shown)])
            write_results(arguments.results, name, "Forecasts beside real runs", found, text)
    print("\n\n".join(map(Table.text, tables(rows, refused, arguments.seed))))


if __name__ == "__main__":
    main()
