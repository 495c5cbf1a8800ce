"""The share of a step that counting the tokens of each expert takes, on one CPU rank.

    python benchmarks/expert_load.py                    # results into benchmarks/results/expert_load.json and .md
    python benchmarks/expert_load.py --smoke            # whether it still runs: two steps

A CPU computes one operator after the other, so the seconds inside of the counting's own functions are what it costs. Of a real
model a token's products are more, and the counting is the same: its share is less.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

from machine import about, parse, parser, write_results

import toolkit as tk
from toolkit.core.display import Table
from toolkit.engines.upstream import patched
from toolkit.training.expert_load import ExpertLoad

SHAPE = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
SHAPE |= {"intermediate_size": 512, "moe_intermediate_size": 128, "vocab_size": 4096, "decoder_sparse_step": 1}
EXPERTS = ((8, 2), (64, 8))
"""Experts of a layer, and those of a token."""
ROWS, SEQ_LEN = 4, 256
LIMIT = 0.01
"""Largest share of a step."""


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Return the function; it adds its seconds to the last of `spent`."""

    def called(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            spent[-1] += time.perf_counter() - began

    return called


class Timed(ExpertLoad):
    """The same, with the seconds of each step."""

    spent: list[float]

    def _hook(self, *arguments: Any) -> Any:
        return timed(super()._hook(*arguments), self.spent)

    def send(self) -> Any:
        """Send, and count its seconds."""
        return timed(super().send, self.spent)()

    def read(self, sent: Any) -> Any:
        """Read, count its seconds, and begin the next step."""
        load = timed(super().read, self.spent)(sent)
        self.spent.append(0.0)
        return load


def measured(experts: int, chosen: int, steps: int) -> dict[str, Any]:
    """Train a Qwen3-MoE of random weights; return the seconds of its steps and of the counting, without the first."""
    import torch
    from transformers import Qwen3MoeConfig

    from toolkit.training import loop
    from toolkit.training.optimizers import make_optimizer, make_schedule
    from toolkit.training.preflight import random_model
    from toolkit.training.preparation import prepared

    Timed.spent = [0.0]
    config = tk.TrainConfig(steps=steps, micro_batch=ROWS, seq_len=SEQ_LEN, warmup=0, lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        random_model(folder, Qwen3MoeConfig(num_experts=experts, num_experts_per_tok=chosen, **SHAPE))
        accelerator = tk.accelerator(tk.Strategy(sharding="none"), config, tk.describe(folder))
        model, _ = tk.load(accelerator)
        optimizer = make_optimizer(model, config)
        model, optimizer, schedule = tk.prepare(accelerator, model, optimizer, make_schedule(optimizer, config))
    rows = torch.randint(3, 4096, (steps, ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    batches = ({"input_ids": ids, "labels": ids} for ids in rows)
    with patched(loop, ExpertLoad=Timed):
        taken = [step.seconds for step in loop.train(prepared(accelerator, (model, optimizer)), batches, schedule)]
    accelerator.end_training()
    spent = Timed.spent[1 : len(taken)]
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "steps": len(spent),
        "step_seconds": sum(taken[1:]),
        "counting_seconds": sum(spent),
        "share": sum(spent) / sum(taken[1:]),
    }


def main() -> None:
    """Measure each number of experts, print and write the results."""
    flags = parser(__doc__)
    flags.add_argument("--steps", type=int, default=10, help="steps of a run (default: %(default)s)")
    given = parse(flags, steps=2)
    rows = [measured(*sizes, given.steps) for sizes in EXPERTS]
    table = Table(
        title="Counting the tokens of each expert",
        columns=("experts", "of a token", "steps", "a step", "counting", "share"),
        rows=[
            (
                row["experts"],
                row["experts_per_token"],
                row["steps"],
                f"{row['step_seconds'] / row['steps']:.3f} s",
                f"{1000 * row['counting_seconds'] / row['steps']:.2f} ms",
                f"{row['share']:.2%}",
            )
            for row in rows
        ],
        notes=(
            f"Qwen3-MoE, {SHAPE['num_hidden_layers']} layers with experts, hidden size {SHAPE['hidden_size']}, "
            f"{ROWS} x {SEQ_LEN} tokens, fp32. At most {LIMIT:.0%}.",
        ),
    )
    print(table.text())
    write_results(
        given.results, "expert_load", "The cost of counting experts' tokens", {**about(), "runs": rows}, table.text()
    )
    if not given.smoke and any(row["share"] > LIMIT for row in rows):
        raise SystemExit("counting the tokens of each expert takes too long")


if __name__ == "__main__":
    main()
