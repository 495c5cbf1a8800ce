"""Loss curves of ZeRO-2 in bf16 with gradients that accumulate in fp32, and in bf16 (`--grad-accum-dtype`), on two CPU ranks.

    python benchmarks/grad_accum.py                    # results into benchmarks/results/grad_accum.json and .md
    python benchmarks/grad_accum.py --smoke            # whether it still runs: two steps

One sequence a micro-batch and eight micro-batches a step: each adds to a sum that is rounded.
"""

from __future__ import annotations

from pathlib import Path

from machine import about, parse, parser, write_results

import toolkit as tk
from toolkit.comparison import compare
from toolkit.config.run_config import RunConfig
from toolkit.core.display import Table

DTYPES = ("fp32", "bf16")
SHOWN = 10
"""Rows of the table."""


def main() -> None:
    """Train twice over the same batches, print the curves, write the results."""
    flags = parser(__doc__)
    flags.add_argument("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    flags.add_argument("--accumulation", type=int, default=8, help="micro-batches of a step (default: %(default)s)")
    flags.add_argument("--work", type=Path, default=Path("runs"), help="folder of the runs (default: %(default)s)")
    arguments = parse(flags, steps=2, accumulation=2)
    train_config = tk.TrainConfig(micro_batch=1, accumulation=arguments.accumulation, steps=arguments.steps)
    strategies = [tk.Strategy(sharding="zero2", precision="bf16", grad_accum_dtype=dtype) for dtype in DTYPES]
    run_config = RunConfig(save=False)
    found = compare(run_config, strategies, train_config, machine=tk.hardware(), root=arguments.work, processes=2)
    curves = [result.losses for result in found.results]
    every = max(1, arguments.steps // SHOWN)
    steps = sorted({1, *range(every, arguments.steps + 1, every)})
    apart = [abs(half / full - 1) for full, half in zip(*curves, strict=True)]
    tail = arguments.steps // 10 or 1
    last = [sum(curve[-tail:]) / tail for curve in curves]
    table = Table(
        title=f"Loss, the embedded 5M-parameter Llama, {arguments.accumulation} micro-batches of 1 x 256 tokens on each of 2 ranks",
        columns=("step", *DTYPES, "difference"),
        rows=[(step, *(f"{curve[step - 1]:.4f}" for curve in curves), f"{apart[step - 1]:.1e}") for step in steps],
        notes=(
            f"Mean of the last {tail} steps: {last[0]:.4f} in fp32, {last[1]:.4f} in bf16. "
            f"Largest relative difference of a step: {max(apart):.1e}.",
        ),
    )
    print(table.text())
    result = {**about(), "losses": dict(zip(DTYPES, curves, strict=True)), "largest_difference": max(apart)}
    write_results(arguments.results, "grad_accum", "Gradients that add up in fp32 and in bf16", result, table.text())


if __name__ == "__main__":
    main()
