"""The forecast of a row of 1,048,576 tokens on 8 H100, term by term, beside what TRL published; nothing is launched.

    python benchmarks/long_rows.py            # results into benchmarks/results/long_rows.json and .md
    python benchmarks/long_rows.py --smoke    # a row of 2,048 tokens

The published run is in `published_runs.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from machine import about, parse, parser, write_results
from published_runs import LONG, Published, llama, long_rows

import toolkit as tk
from toolkit.core.display import Table
from toolkit.engines.resolution import resolve
from toolkit.forecasting import forecast_job

WAYS: dict[str, Mapping[str, Any]] = {
    "inputs of layers on the GPU": {"activation_offload": False},
    "on the host": {},
    "and MLPs in tiles": {"mlp_tiles": "auto"},
}
"""Each adds to the one before."""

LLAMA_3_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": LONG,
}  # fmt: skip


def forecast(run: Published, config: Any, fields: Mapping[str, Any], seq_len: int) -> dict[str, Any]:
    """Forecast the published run with other fields of its strategy, in bytes and seconds."""
    machine = tk.hardware(run.hardware)
    strategy, batch = (
        dataclasses.replace(run.strategy, **fields),
        dataclasses.replace(run.train_config, seq_len=seq_len),
    )
    job = resolve(strategy, batch, tk.describe(config), machine.ranks, machine.device)
    result = forecast_job(job, machine, one_document=True, num_checkpoints=0)
    return {
        **{name: size for name, size in result.parts.items() if size},
        "peak": result.peak_bytes,
        "with CUDA's own memory": result.needed_bytes,
        "the node's host": result.host_bytes,
        "step, seconds": result.timing.step_seconds if result.timing else None,
    }


def table(model: str, ways: Mapping[str, Mapping[str, Any]], published: Mapping[str, Any]) -> Table:
    """Return a model's terms, a column for each way."""

    def cell(name: str, value: float | None) -> str:
        if value is None:
            return "–"
        return f"{value:,.0f}" if name.endswith("seconds") else f"{value / 1e9:,.1f}"

    names = list(dict.fromkeys(name for terms in ways.values() for name in terms))
    rows = [
        (name, *(cell(name, terms.get(name)) for terms in ways.values()), cell(name, published.get(name)))
        for name in names
    ]
    return Table(title=f"{model}, GB of a GPU at the peak", columns=("term", *ways, "published"), rows=rows)


def main() -> None:
    """Forecast both models, print the tables, write the results."""
    arguments = parse(parser(__doc__))
    (run,) = long_rows()
    seq_len, some = (2048, 1) if arguments.smoke else (LONG, None)
    assert run.speed
    seconds = LONG / run.speed / tk.hardware(run.hardware).ranks
    published = {"Qwen3 8B": {"peak": run.memory, "step, seconds": seconds}}
    models = {"Qwen3 8B": run.config, "Llama 3 8B": llama(LLAMA_3_8B)}
    rows = {
        model: {way: forecast(run, config, fields, seq_len) for way, fields in list(WAYS.items())[:some]}
        for model, config in list(models.items())[:some]
    }
    tables: Sequence[Table] = [table(model, ways, published.get(model, {})) for model, ways in rows.items()]
    text = "\n\n".join(map(Table.text, tables))
    print(text)
    result = {**about(), "seq_len": seq_len, "forecast": rows, "published": published, "source": run.source}
    remarks = f"FSDP2 and context parallelism over 8 H100, {seq_len:,} tokens. Published: {run.source}; {run.assumed}."
    write_results(arguments.results, "long_rows", "A row of a million tokens", result, text, remarks)


if __name__ == "__main__":
    main()
