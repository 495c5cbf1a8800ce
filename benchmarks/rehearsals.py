"""Ranks of many rehearsed alone, beside their forecast: the forecast's judge at 64 to 1,024 ranks.

    python benchmarks/rehearsals.py            # 41 cells; results into benchmarks/results/rehearsals.json and .md
    python benchmarks/rehearsals.py --smoke    # one cell

Each cell is a model's shape, a strategy, a number of ranks and one of them. The results are written after each cell. A cell that
they hold for these versions and this machine is not run again, and its forecast is made again. Each row has the commit that
measured it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from machine import about, commit, parse, parser, write_results

import toolkit as tk
from toolkit.config.train_config import TrainConfig
from toolkit.core.display import Table
from toolkit.core.errors import ToolkitError
from toolkit.core.units import format_bytes
from toolkit.forecasting.prediction import resolve_request
from toolkit.training.rehearsal import forecast_rank

WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16}
ROUTED = {"intermediate_size": 128, "num_key_value_heads": 4, "num_experts_per_tok": 2, "vocab_size": 16_384}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**WIDE, "num_key_value_heads": 4, "vocab_size": 16_384},
    "qwen3": {**WIDE, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16_384, "tie_word_embeddings": True},
    "gpt_neox": {**WIDE, "vocab_size": 16_384},
    "mixtral": {**WIDE, **ROUTED, "num_local_experts": 64},
    "qwen3_moe": {**WIDE, **ROUTED, "head_dim": 64, "num_experts": 64, "moe_intermediate_size": 128},
}
"""Model types, and values of their configs: wide enough that a rank of 1,024 holds a row of each matrix."""

BF16, LORA, PLAIN = {"precision": "bf16"}, {"adapter": "lora"}, {"activation_checkpointing": "none"}
PIPELINE = {"pp": 4, "accumulation": 4}
LONG = {"loss": "chunked", "mlp_tiles": "4", "activation_offload": True}
Cell = tuple[str, int, int, dict[str, Any]]
CELLS: list[Cell] = [
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
    # The first, a middle and the last stage of a pipeline.
    ("llama", 64, 5, {"sharding": "fsdp", **PIPELINE}),
    ("llama", 256, 130, {"sharding": "fsdp", **PIPELINE, **BF16}),
    ("llama", 1024, 1023, {"sharding": "fsdp", **PIPELINE}),
    ("llama", 64, 20, {"sharding": "ddp", **PIPELINE, **PLAIN}),
    ("llama", 512, 511, {"sharding": "ddp", **PIPELINE, "tp": 2, **BF16}),
    ("llama", 128, 70, {"sharding": "fsdp", "pp": 2, "accumulation": 4, "pp_schedule": "gpipe", "tp": 2}),
    ("llama", 1024, 300, {"sharding": "fsdp", **PIPELINE, "tp": 4, **BF16}),
    ("llama", 64, 33, {"sharding": "fsdp", "pp": 2, "accumulation": 4, "pp_schedule": "interleaved"}),
    ("llama", 64, 1, {"sharding": "fsdp", "pp": 2, "accumulation": 4, "pp_schedule": "zero_bubble", **PLAIN}),
    ("llama", 128, 100, {"sharding": "fsdp", **PIPELINE, **LORA, **BF16}),
    ("qwen3", 64, 63, {"sharding": "fsdp", **PIPELINE, "loss": "chunked"}),
    ("gpt_neox", 256, 0, {"sharding": "hsdp", "dp_replicate": 2, **PIPELINE}),
    # Experts, with equally many tokens for each.
    ("mixtral", 64, 20, {"sharding": "fsdp", **BF16}),
    ("mixtral", 64, 5, {"sharding": "fsdp", "ep": 8}),
    ("mixtral", 64, 60, {"sharding": "fsdp", "ep": 16, **BF16}),
    ("mixtral", 1024, 1000, {"sharding": "hsdp", "dp_replicate": 16, "ep": 8, "tp": 2, **BF16}),
    ("mixtral", 64, 17, {"sharding": "fsdp_grad_op", "ep": 32, **PLAIN}),
    ("qwen3_moe", 256, 9, {"sharding": "hsdp", "dp_replicate": 4, "ep": 8}),
    ("qwen3_moe", 64, 1, {"sharding": "fsdp", "ep": 4, "loss": "chunked"}),
]


MEASURED = ("phases", "peak_bytes", "step_seconds", "refused", "commit")
"""What a row keeps where its forecast is made again."""


def row_of(cell: Cell, stored: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the rehearsal of a cell beside its forecast, or why there is none. A stored one is not run again."""
    from transformers import AutoConfig

    family, ranks, rank, fields = cell
    row = {"family": family, "ranks": ranks, "rank": rank, "fields": fields}
    spec = tk.describe(AutoConfig.for_model(family, **FAMILIES[family]))
    loop = {name: value for name, value in fields.items() if name in TrainConfig.__dataclass_fields__}
    strategy = tk.Strategy(**{name: value for name, value in fields.items() if name not in loop})
    batch = tk.TrainConfig(micro_batch=1, seq_len=512, lr=1e-3, **loop)
    try:
        if stored is None:
            made = tk.rehearse(spec, strategy, batch, ranks=ranks, rank=rank).to_dict()
            return {**row, **made, "commit": commit()}
        forecast = forecast_rank(*resolve_request(spec, strategy, None, batch, ranks=ranks), rank)
    except ToolkitError as error:
        return {**row, "refused": str(error), "commit": commit()}
    kept = {name: stored[name] for name in MEASURED if name in stored}
    made = {"forecast_peak_bytes": forecast.peak_bytes, "ratio": forecast.peak_bytes / stored["peak_bytes"]}
    return {**row, **kept, **made}


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
    flags.add_argument("--again", action="store_true", help="run cells that the results hold, too")
    given = parse(flags, cells=1)
    path: Path = given.results / "rehearsals.json"
    before: dict[str, Any] = json.loads(path.read_text()) if path.exists() and not given.again else {}
    here = {name: before.get(name) == about()[name] for name in ("versions", "machine")}
    stored = {name_of(row): row for row in before.get("rows", []) if all(here.values()) and "peak_bytes" in row}
    made = dict(stored)
    for cell in CELLS[: given.cells]:
        name = name_of(dict(zip(("family", "ranks", "rank", "fields"), cell, strict=True)))
        made[name] = row_of(cell, stored.get(name))
        rows = [*made.values()]
        commits = ", ".join(sorted({row["commit"] for row in rows}))
        shown = "\n\n".join(table.text() for table in tables(rows))
        result = {**about(), "commit": commits, "rows": rows}
        write_results(given.results, "rehearsals", "Ranks rehearsed alone", result, shown)
    print("\n\n".join(table.text() for table in tables(rows)))


def name_of(row: Mapping[str, Any]) -> str:
    """Return what distinguishes a row."""
    return json.dumps([row[name] for name in ("family", "ranks", "rank", "fields")])


if __name__ == "__main__":
    main()
