"""Speed and memory of the recipe beside a hand-written Accelerate loop and TRL's SFTTrainer: the same model and rows, in turns.

    python benchmarks/trainers.py                     # results into benchmarks/results/trainers.json and .md
    python benchmarks/trainers.py --vocabularies 8192 --rounds 1
    python benchmarks/trainers.py --smoke             # a tiny model, without TRL

One process and two threads, fp32, no activation checkpointing on any side. Each side runs in a process of its own; the order of
the sides changes from round to round. Speed: tokens of a step over its median seconds. Memory: the highest resident set above that
after the imports. Ratios are the medians over the rounds.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from machine import about, parse, parser, write_results

from toolkit.core.display import Table
from toolkit.core.units import format_bytes

ROWS, SKIPPED = 4, 2
"""Rows of a step; steps that do not count."""

SHARED = ("accelerate", "transformers.models.llama.modeling_llama")
IMPORTS = {
    "toolkit": (*SHARED, "toolkit", "toolkit.training.rank_run"),
    "hand-written": SHARED,
    "trl": (*SHARED, "trl.trainer.sft_trainer"),
}
"""Side → what it imports before its memory counts. A model's module, and with it torch's compiler, comes when it is built."""


def toolkits(folder: Path, steps: int, done: Callable[[], None]) -> None:
    """Train as `toolkit train` does on a CPU, without checkpoints."""
    from recipe import rank

    from toolkit.config.run_config import RunConfig
    from toolkit.config.strategy import Strategy
    from toolkit.config.train_config import TrainConfig

    strategy = Strategy(sharding="none", precision="fp32", activation_checkpointing="none", loss="chunked")
    train_config = TrainConfig(steps=steps, micro_batch=ROWS, seq_len=len(rows_of(folder)[0]))
    run_config = RunConfig(model=str(folder), data=str(folder / "text.jsonl"))
    with rank(strategy, train_config, run_config, folder / f"run{os.getpid()}") as this:
        policy = this.policy(None)
        for step in this.steps(policy):
            policy.step_done(step)
            done()
        this.run.window.close()


def by_hand(folder: Path, steps: int, done: Callable[[], None]) -> None:
    """Train as Accelerate's documentation shows."""
    import torch
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

    accelerator = Accelerator(mixed_precision="no")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, steps)
    loader: Any = torch.utils.data.DataLoader(torch.tensor(rows_of(folder)), batch_size=ROWS)  # type: ignore[arg-type]
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for ids in loader:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loss.item()
        done()


def trls(folder: Path, steps: int, done: Callable[[], None]) -> None:
    """Train with TRL as it comes, but in fp32 and without checkpointing."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

    class Clock(TrainerCallback):  # type: ignore[misc]  # untyped
        def on_step_end(self, *_: Any, **__: Any) -> None:
            done()

    place = str(folder / f"trl{os.getpid()}")
    plain: dict[str, Any] = {"bf16": False, "gradient_checkpointing": False, "use_cpu": True}
    args = SFTConfig(
        place, per_device_train_batch_size=ROWS, max_steps=steps, save_strategy="no", report_to=[], **plain
    )
    data = Dataset.from_dict({"input_ids": rows_of(folder)})
    SFTTrainer(model=str(folder), args=args, train_dataset=data, callbacks=[Clock()]).train()


SIDES = {"toolkit": toolkits, "hand-written": by_hand, "trl": trls}


def rows_of(folder: Path) -> Any:
    """Return the rows of tokens that all sides train on."""
    return json.loads((folder / "rows.json").read_text())


def prepare(folder: Path, vocabulary: int, steps: int, smoke: bool) -> None:
    """Save a Llama of 6 layers with a hidden size of 512, one long document, and its rows."""
    import shutil

    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from toolkit.data.embedded import embedded_files, embedded_model

    hidden, layers, length = (32, 1, 64) if smoke else (512, 6, 512)
    shape = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_attention_heads=8, **shape)).save_pretrained(folder)
    for file in embedded_model().glob("token*"):
        shutil.copy(file, folder)
    text = "".join(file.read_text(errors="replace") for file in embedded_files())[: 8 * steps * ROWS * length]
    (folder / "text.jsonl").write_text(json.dumps({"text": text}))
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    rows = [ids[at : at + length] for at in range(0, steps * ROWS * length, length)]
    (folder / "rows.json").write_text(json.dumps(rows))


def child(side: str, folder: Path, steps: int) -> None:
    """Train on one side. Print the seconds of each step, and the memory."""
    for name in IMPORTS[side]:
        import_module(name)
    clear_peak()
    imported, times = resident("VmRSS"), [time.perf_counter()]
    SIDES[side](folder, steps, lambda: times.append(time.perf_counter()))
    seconds = [after - before for before, after in itertools.pairwise(times)]
    print(json.dumps({"seconds": seconds[SKIPPED:], "peak": resident("VmHWM") - imported}))


def clear_peak() -> None:
    """Let the kernel's highest resident set begin here."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(name: str) -> int:
    """Return bytes of this process's resident set, now (`VmRSS`) or its highest (`VmHWM`)."""
    found = re.search(rf"^{name}:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def run(side: str, folder: Path, steps: int) -> dict[str, Any]:
    """Run `child`."""
    words = [sys.executable, __file__, "--child", side, "--folder", str(folder), "--steps", str(steps)]
    environ = {**os.environ, "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
    output = subprocess.run(words, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def measure(vocabulary: int, sides: Sequence[str], rounds: int, steps: int, smoke: bool) -> dict[str, Any]:
    """Return the runs of each side, and the medians of the ratios."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder, vocabulary, steps, smoke)
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for number in range(rounds):
            first = number % len(sides)
            for side in (*sides[first:], *sides[:first]):
                runs[side].append(run(side, folder, steps))
        tokens = ROWS * len(rows_of(folder)[0])
    seconds = {side: [statistics.median(each["seconds"]) for each in several] for side, several in runs.items()}
    peaks = {side: [each["peak"] for each in several] for side, several in runs.items()}
    ours = sides[0]
    return {
        "vocabulary": vocabulary,
        "runs": runs,
        "tokens_per_second": {side: tokens / statistics.median(values) for side, values in seconds.items()},
        "peak_bytes": {side: statistics.median(values) for side, values in peaks.items()},
        "speed_ratio": {side: ratio(seconds[side], seconds[ours]) for side in sides[1:]},
        "peak_ratio": {side: ratio(peaks[ours], peaks[side]) for side in sides[1:]},
    }


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(one / other for one, other in zip(above, below, strict=True))


def table(results: Sequence[dict[str, Any]]) -> Table:
    """Return a line for each vocabulary and side."""
    rows = [
        (
            f"{each['vocabulary']:,}",
            side,
            f"{speed:,.0f}",
            format_bytes(each["peak_bytes"][side]),
            *(f"{each[name][side]:.2f}" if side in each[name] else "" for name in ("speed_ratio", "peak_ratio")),
        )
        for each in results
        for side, speed in each["tokens_per_second"].items()
    ]
    columns = ("vocabulary", "side", "tokens/s", "peak", "toolkit's speed over it", "toolkit's peak over it")
    return Table(title="The recipe beside other trainers", columns=columns, rows=rows)


def main() -> None:
    """Measure all vocabularies, print the table, write the results."""
    flags = parser(__doc__)
    flags.add_argument("--vocabularies", default="8192,32768", help="sizes, with commas (default: %(default)s)")
    flags.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    flags.add_argument("--steps", type=int, default=8, help="of each run (default: %(default)s)")
    flags.add_argument("--sides", default=",".join(SIDES), help="toolkit first (default: %(default)s)")
    flags.add_argument("--child", choices=SIDES, help="in a child process: a side")
    flags.add_argument("--folder", type=Path, help="in a child process: of model and rows")
    given = parse(flags, vocabularies="4096", rounds=1, steps=4, sides="toolkit,hand-written")
    if given.child:
        child(given.child, given.folder, given.steps)
        return
    sides = given.sides.split(",")
    sizes = map(int, given.vocabularies.split(","))
    results = [measure(size, sides, given.rounds, given.steps, given.smoke) for size in sizes]
    shown = table(results).text()
    facts = about()
    if "trl" in sides:
        facts["versions"]["trl"] = metadata.version("trl")
    write_results(given.results, "trainers", "The recipe beside other trainers", {**facts, "results": results}, shown)
    print(shown)


if __name__ == "__main__":
    main()
