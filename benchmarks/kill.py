"""A run that saves often is struck by SIGKILL at random moments and resumed at once, until it is finished.

    python benchmarks/kill.py --trials 24                  # results into benchmarks/results/kill.json and .md
    python benchmarks/kill.py --trials 200 --continue      # go on with what a stopped benchmark left in --work
    python benchmarks/kill.py --smoke                      # whether it still runs: one strike
    python benchmarks/kill.py --trials 4 --sharding zero2 --seed 17 --work /tmp/again    # the run that printed this
    python benchmarks/kill.py --meshes                     # tp, cp, ep and pp; results into kill_meshes.json and .md. It goes on
                                                           # with what these hold for these versions and this machine

A trial is a strike: at one rank, at all ranks, at `accelerate launch` alone, or at the supervisor (`toolkit train`) alone.
A run is struck once by each, in a random order. One strike in five falls into the start of an attempt, the others into its
steps, of which every second is saved. A third of the resumes stand at the door already when the strike falls.

Asserted of each run: it finishes; every step's loss, norm, rate, tokens and samples, and the files of its last checkpoint, are
bit for bit those of a run that was never stopped; every step is in `events.jsonl` once. Meanwhile a thread looks at the
checkpoints every 5 ms: there is a complete one at every moment after the first. And when a new attempt's ranks
appear, none of the struck attempt lives.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from forking import server
from kill_worker import KINDS, Victim, command, own_environ, ranks_of
from machine import about, commit, parse, parser, stored, write_results

from toolkit.checkpoints import folder_name, list_checkpoints
from toolkit.core.atomic_io import append_line, read_events
from toolkit.core.display import Table

PLAN = ("commit", "sharding", "ranks", "steps", "strikes", "seed")
"""What a benchmark that goes on must have begun with."""


MESHES = {
    "sharding": "fsdp-tp2,pp2,cp2,fsdp-pp2,fsdp-ep2,pp2,fsdp-tp2,fsdp-pp2,fsdp-ep2,pp2",
    "trials": 40,
}
"""Of `--meshes`: every second run is one over pipelines."""

STARTING = 2
"""A seed with its first strike in a start, which is sooner than a step."""


def make_inputs(work: Path) -> None:
    """A tiny Llama and a mixture with a tokenizer, and fewer tokens than the run takes: it comes to a second epoch."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape)).save_pretrained(work / "model")
    routed = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    MixtralForCausalLM(MixtralConfig(vocab_size=256, **shape, **routed)).save_pretrained(work / "mixture")
    words = [*(special := ["<pad>", "<unk>", "</s>"]), *(f"w{index}" for index in range(250))]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "unk_token", "eos_token"), special, strict=True))
    for model in ("model", "mixture"):
        PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(work / model)
    draw = random.Random(0)
    texts = (" ".join(draw.choices(words[3:], k=draw.randrange(20, 200))) for _ in range(100))
    (work / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def refer(arguments: argparse.Namespace, sharding: str) -> None:
    """The run that is never stopped; made once."""
    folder = arguments.work / f"reference-{sharding}"
    if next(iter(list_checkpoints(folder / "checkpoints")), Path()).name == folder_name(arguments.steps):
        return
    shutil.rmtree(folder, ignore_errors=True)
    log, ranks = folder.with_suffix(".log"), ranks_of(arguments, sharding)
    words = [*command(arguments, sharding), "--run-dir", str(folder)]
    environ = own_environ(arguments)
    if code := server().run(words, ranks, log, distributed=sharding != "none", environ=environ):
        sys.exit(f"The run that is never stopped ended with {code}:\n{log.read_text()[-4000:]}")


def results_name(arguments: argparse.Namespace) -> str:
    """The results' files, without their ending."""
    return "kill_meshes" if arguments.meshes else "kill"


def done_before(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What `--meshes` need not do again: the stored runs of the same plan without a problem. `--again`: none."""
    found = stored(arguments.results / f"{results_name(arguments)}.json")
    same = all(found.get(name) == getattr(arguments, name) for name in PLAN if name != "commit")
    goes_on = arguments.meshes and same and not arguments.again
    return [run for run in found["runs"] if not run["problems"]] if goes_on else []


def tables(runs: list[dict[str, Any]]) -> list[Table]:
    """By what was struck, and by strategy."""
    trials = [{**trial, "sharding": run["sharding"], "run": run} for run in runs for trial in run["trials"]]

    def row(name: str, some: list[dict[str, Any]]) -> tuple[Any, ...]:
        gone = [trial["gone_seconds"] for trial in some if trial.get("gone_seconds") is not None]
        return (
            name,
            len(some),
            sum(trial["resumed"] for trial in some),
            sum(trial["resumed"] and not trial["run"]["problems"] for trial in some),
            sum(trial["saving"] for trial in some),
            sum(trial["moment"] == "start" for trial in some),
            sum(trial["at_the_door"] for trial in some),
            sum(trial.get("refused", 0) for trial in some),
            f"{statistics.median(gone):.2f} / {max(gone):.2f}" if gone else "–",
        )

    columns = ("trials", "resumed", "exact", "in a save", "in a start", "at the door", "refused", "gone, s")
    notes = (
        "exact: steps and last checkpoint of the finished run are bit for bit those of one that was never stopped.",
        "in a save: a checkpoint was half-written or half-removed as the strike fell. in a start: before the first step.",
        "at the door: the resume was started before the strike, and waited for the lock. refused: it waited too long.",
        "gone: from the strike until no rank of the struck attempt lived, median / most.",
        f"checkpoints: {sum(run['looks'] for run in runs):,} looks, {sum(run['gaps'] for run in runs)} without a complete"
        " one after the first. Two attempts' ranks lived at once: "
        f"{sum(trial.get('beside', 0) > 0 for trial in trials)} times.",
    )
    words = list(dict.fromkeys(run["sharding"] for run in runs))
    by_kind = [row(kind, [trial for trial in trials if trial["struck"] == kind]) for kind in KINDS]
    by_word = [row(word, [trial for trial in trials if trial["sharding"] == word]) for word in words]
    return [
        Table(title="Killed and resumed", columns=("struck", *columns), rows=by_kind),
        Table(columns=("sharding", *columns), rows=[*by_word, row("all", trials)], notes=notes),
    ]


def publish(arguments: argparse.Namespace, runs: list[dict[str, Any]]) -> str:
    """Write both files. Return the tables."""
    asked = {name: getattr(arguments, name) for name in PLAN}
    commits = {"commit": ", ".join(sorted({run["commit"] for run in runs}))}
    whole = {**about(), **asked, **commits, "trials_asked": arguments.trials, "runs": runs}
    text = "\n\n".join(table.text() for table in tables(runs))
    failed = [f"- run {run['run']} ({run['sharding']}, --seed {run['seed']}): {why}" for run in runs
              for why in run["problems"]]  # fmt: skip
    said = (
        "\n".join(failed)
        or f"No failure in {len(runs)} runs of {arguments.ranks} ranks{' or more' * arguments.meshes}, seeds from {arguments.seed}."
    )
    write_results(arguments.results, results_name(arguments), "Killed and resumed", whole, text, said)
    return f"{text}\n\n{said}"


def begin(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Make the work folder and its inputs; what an earlier, stopped benchmark had done in it."""
    work: Path = arguments.work
    plan = {name: getattr(arguments, name) for name in PLAN}
    if (work / "plan.json").exists():
        if not arguments.go_on:
            sys.exit(f"{work} holds a benchmark: go on with --continue, or remove it, or name another --work.")
        if json.loads((work / "plan.json").read_text()) != plan:
            sys.exit(f"{work} holds another benchmark than {plan}.")
    else:
        work.mkdir(parents=True, exist_ok=True)
        make_inputs(work)
        (work / "plan.json").write_text(json.dumps(plan))
    return read_events(work / "progress.jsonl")


def main() -> None:
    """Strike, resume, compare; write the results after every run."""
    made = parser(__doc__)
    made.add_argument("--trials", type=int, default=200)
    made.add_argument("--sharding", default="ddp,zero2,zero3,fsdp")
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--steps", type=int, default=220, help="of each run")
    made.add_argument("--strikes", default=",".join(KINDS), help="of each run, in a random order")
    made.add_argument("--start-seconds", type=float, default=10.0, help="strikes into a start fall within so long")
    made.add_argument("--seed", type=int, default=0, help="of the first run; each has the next one")
    made.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "toolkit-kill"), help="scratch folder")
    made.add_argument("--continue", dest="go_on", action="store_true", help="go on with what --work holds")
    made.add_argument("--meshes", action="store_true", help="degrees of parallelism, too")
    made.add_argument("--again", action="store_true", help="of --meshes: do also what the results hold already")
    if "--meshes" in sys.argv[1:]:
        # A folder for each commit: a run is compared with one of the same code that was never stopped.
        work = Path(tempfile.gettempdir(), f"toolkit-kill-meshes-{commit()[:12]}")
        made.set_defaults(**MESHES, go_on=True, work=work)
    tiny = {"trials": 1, "sharding": "none", "ranks": 1, "steps": 6, "strikes": "supervisor", "start_seconds": 1.0}
    arguments = parse(made, **tiny, seed=STARTING)
    arguments.commit = commit()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the attempt that runs is ended, too
    runs, words = done_before(arguments), arguments.sharding.split(",")
    numbers = range(-(-arguments.trials // len(arguments.strikes.split(","))))
    if {*numbers} - {run["run"] for run in runs}:
        runs += [run for run in begin(arguments) if run["run"] not in {each["run"] for each in runs}]
    left = [number for number in numbers if number not in {run["run"] for run in runs}]
    for word in dict.fromkeys(words[number % len(words)] for number in left):
        refer(arguments, word)
    for number in left:
        sharding = words[number % len(words)]
        run = {**Victim(arguments, number, sharding).live(), "commit": arguments.commit}
        append_line(arguments.work / "progress.jsonl", run)
        runs.append(run)
        publish(arguments, sorted(runs, key=lambda each: each["run"]))
        resumed, said = sum(trial["resumed"] for trial in run["trials"]), "; ".join(run["problems"]) or "exact"
        print(
            f"run {number}, {sharding}, seed {run['seed']}: {resumed} of {len(run['trials'])} resumed, {said}",
            flush=True,
        )
    print(publish(arguments, sorted(runs, key=lambda each: each["run"])))
    sys.exit(any(run["problems"] for run in runs))


if __name__ == "__main__":
    main()
