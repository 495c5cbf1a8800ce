"""Ranks of many rehearsed alone, beside their forecast: the forecast's judge at 64 to 1,024 ranks.

    python benchmarks/rehearsals.py            # 22 cells; results into benchmarks/results/rehearsals.json and .md
    python benchmarks/rehearsals.py --smoke    # one cell

Each cell is a model's shape, a strategy, a number of ranks and one of them. The results are written after each cell; a second call
of the same commit goes on where the first stopped.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from machine import about, parse, parser, write_results

import toolkit as tk
from toolkit.core.display import Table
from toolkit.core.errors import ToolkitError
from toolkit.core.units import format_bytes

WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**WIDE, "num_key_value_heads": 4, "vocab_size": 16_384},
    "qwen3": {**WIDE, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16_384, "tie_word_embeddings": True},
    "gpt_neox": {**WIDE, "vocab_size": 16_384},
}
"""Model types, and values of their configs: wide enough that a rank of 1,024 holds a row of each matrix."""

BF16, LORA, PLAIN = {"precision": "bf16"}, {"adapter": "lora"}, {"activation_checkpointing": "none"}
LONG = {"loss": "chunked", "mlp_tiles": "4", "activation_offload": True}
CELLS: list[tuple[str, int, int, dict[str, Any]]] = [
    ("llama", 64, 0, {"sharding": "fsdp"}),
    ("llama", 256, 37, {"sharding": "fsdp", **BF16}),
    ("llama", 1024, 1023, {"sharding": "fsdp", **BF16, **PLAIN}),
    ("llama", 512, 100, {"sharding": "fsdp", "loss": "chunked"}),
    ("llama", 128, 5, {"sharding": "fsdp_grad_op"}),
    ("llama", 1024, 512, {"sharding": "fsdp_grad_op", **BF16}),
    ("llama", 256, 200, {"sharding": "hsdp", "dp_replicate": 8}),
    ("llama", 64, 63, {"sharding": "fsdp", **LORA, **BF16}),
    ("llama", 64, 8, {"sharding": "fsdp", "precision": "bf16_pure"}),
    ("llama", 64, 9, {"sharding": "fsdp", **LONG}),
    ("llama", 64, 1, {"sharding": "fsdp", "tp": 2}),
    ("llama", 256, 255, {"sharding": "fsdp", "tp": 4, **BF16}),
    ("llama", 128, 3, {"sharding": "fsdp_grad_op", "tp": 2, "loss": "chunked"}),
    ("llama", 64, 33, {"sharding": "fsdp", "cp": 2}),
    ("llama", 256, 7, {"sharding": "fsdp", "cp": 4, "cp_attention": "gather", "loss": "chunked"}),
    ("qwen3", 64, 2, {"sharding": "fsdp"}),
    ("qwen3", 512, 300, {"sharding": "hsdp", "dp_replicate": 2, **BF16}),
    ("qwen3", 64, 40, {"sharding": "fsdp", "tp": 2, **BF16}),
    ("qwen3", 128, 64, {"sharding": "fsdp", "cp": 2, "loss": "chunked"}),
    ("gpt_neox", 256, 11, {"sharding": "fsdp", **BF16}),
    ("gpt_neox", 64, 12, {"sharding": "fsdp_grad_op", **PLAIN}),
    ("gpt_neox", 64, 13, {"sharding": "fsdp", "tp": 2}),
]


def measured(cell: tuple[str, int, int, dict[str, Any]]) -> dict[str, Any]:
    """Return the rehearsal of a cell, or why there is none."""
    from transformers import AutoConfig

    family, ranks, rank, fields = cell
    row = {"family": family, "ranks": ranks, "rank": rank, "fields": fields}
    spec = tk.describe(AutoConfig.for_model(family, **FAMILIES[family]))
    batch = tk.TrainConfig(micro_batch=1, seq_len=512, lr=1e-3)
    try:
        return {**row, **tk.rehearse(spec, tk.Strategy(**fields), batch, ranks=ranks, rank=rank).to_dict()}
    except ToolkitError as error:
        return {**row, "refused": str(error)}


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Return each cell's peak and its forecast, and what failed."""
    done = [row for row in rows if "ratio" in row]
    off = sorted(abs(row["ratio"] - 1) for row in done)
    figures = [
        (
            row["family"],
            f"{row['rank']} of {row['ranks']}",
            ", ".join(f"{name} {value}" for name, value in row["fields"].items()),
            format_bytes(row["peak_bytes"]),
            f"{row['ratio'] - 1:+.1%}",
        )
        for row in done
    ]
    title = f"Forecast beside the rehearsed peak of {len(done)} ranks"
    if off:
        title += (
            f": median {statistics.median(off):.1%}, {sum(each <= 0.02 for each in off)} within 2%, worst {off[-1]:.1%}"
        )
    failed = [(row["family"], row["ranks"], row["refused"]) for row in rows if "refused" in row]
    columns = ("family", "rank", "strategy", "rehearsed", "forecast")
    made = [Table(title=title, columns=columns, rows=figures)]
    return [*made, Table(title="Not run", columns=("family", "ranks", "why"), rows=failed)] if failed else made


def main() -> None:
    """Rehearse all cells, and write after each."""
    flags = parser(__doc__)
    flags.add_argument("--cells", type=int, default=len(CELLS), help="the first so many (default: %(default)s)")
    given = parse(flags, cells=1)
    path: Path = given.results / "rehearsals.json"
    before: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    rows = before.get("rows", []) if before.get("commit") == about()["commit"] else []
    for cell in CELLS[len(rows) : given.cells]:
        rows.append(measured(cell))
        shown = "\n\n".join(table.text() for table in tables(rows))
        write_results(given.results, "rehearsals", "Ranks rehearsed alone", {**about(), "rows": rows}, shown)
    print("\n\n".join(table.text() for table in tables(rows)))


if __name__ == "__main__":
    main()
