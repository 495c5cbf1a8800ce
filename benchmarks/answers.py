"""How long `toolkit forecast` takes, as a process of its own: the first answer for a model, and others for one seen before.

    python benchmarks/answers.py            # results into benchmarks/results/answers.json and .md
    python benchmarks/answers.py --smoke    # whether it still runs: one first answer, of a small model

The first answer of each round finds an empty cache. After it the toolkit traces other sizes in the background; when that has
ended, the others change one thing each, in copies of this cache.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from machine import about, parse, parser, write_results

from toolkit.core.display import Table

QWEN3_8B = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_936, "hidden_size": 4096,
    "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40_960,
}  # fmt: skip
SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 2}

FIRST = {"hardware": "8x H100-80GB", "sharding": "zero3", "seq-len": "4096", "micro-batch": "1"}
OTHERS = {
    "another length": {"seq-len": "6144"},
    "another micro-batch": {"micro-batch": "3"},
    "another sharding": {"sharding": "fsdp"},
    "another device": {"hardware": "8x A100-80GB"},
}


def seconds(model: Path, cache: Path, changed: Mapping[str, str], *, background: bool = True) -> float:
    """The time of one answer. What it left to the background has ended, too."""
    flags = [word for name, value in {**FIRST, **changed}.items() for word in (f"--{name}", value)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "TOOLKIT_BACKGROUND": str(int(background))}
    began = time.monotonic()
    command = [sys.executable, "-m", "toolkit", "forecast", str(model), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    took = time.monotonic() - began
    for path in (cache / "accelerate-toolkit" / "background").glob("*.lock"):
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)  # the work holds it until its end
    return took


def main() -> None:
    """Ask in turn, print the medians, write the results."""
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    given = parse(flags, rounds=1)
    others = {} if given.smoke else OTHERS
    took: dict[str, list[float]] = {name: [] for name in ("first", *others)}
    with tempfile.TemporaryDirectory() as scratch:
        model, kept, cache = (Path(scratch, name) for name in ("model", "kept", "cache"))
        model.mkdir()
        (model / "config.json").write_text(json.dumps(QWEN3_8B | (SMALL if given.smoke else {})))
        for _ in range(given.rounds):
            shutil.rmtree(kept, ignore_errors=True)
            took["first"].append(seconds(model, kept, {}, background=bool(others)))
            for name, changed in others.items():
                shutil.rmtree(cache, ignore_errors=True)
                shutil.copytree(kept, cache)
                took[name].append(seconds(model, cache, changed))
    table = Table(
        title=f"Seconds of an answer of {'a small Qwen3' if given.smoke else 'Qwen3-8B'}, {given.rounds} rounds",
        columns=("answer", "median", "least", "most"),
        rows=[
            (name, *(f"{figure(times):.2f}" for figure in (statistics.median, min, max)))
            for name, times in took.items()
        ],
        notes=(f"toolkit forecast MODEL {' '.join(f'--{name} {value}' for name, value in FIRST.items())}",),
    )
    print(table.text())
    write_results(given.results, "answers", "How long a forecast takes", {**about(), "seconds": took}, table.text())


if __name__ == "__main__":
    main()
