"""Peak memory of a rank while a model is loaded and prepared, against the memory that it keeps.

    python benchmarks/load_peak.py                     # results into benchmarks/results/load_peak.json and .md
    python benchmarks/load_peak.py --smoke             # whether it still runs

Each line is one run of a Llama in bfloat16. States: a rank's parameters, masters and quantization constants. Kept: all that is
allocated when `prepare` has ended, with the gradients' buckets of DDP and DeepSpeed, which stay for the whole training. Figures of
the fullest rank: the CPU allocator's highest total in the phases load and prepare, and the process's own memory (RssAnon: without
pages of files that are only mapped) above what it had before the first tensor. The bound is 1.15 times the states, the
largest parameter in the file's dtype, and 64 MiB. The results are written after each line.
"""

from __future__ import annotations

import gc
import tempfile
import threading
from pathlib import Path
from typing import Any

from forking import result_of, write
from machine import about, parse, parser, write_results

from toolkit.core.display import Table
from toolkit.core.units import KiB, MiB, format_bytes

CASES = [
    {"sharding": sharding, "adapter": adapter, "precision": precision, "ranks": ranks}
    for adapter, precision in (("none", "bf16"), ("none", "bf16_pure"), ("lora", "bf16"), ("qlora", "bf16"))
    for sharding in ("ddp", "fsdp", "hsdp", "zero3")
    for ranks in (2, 4)
    if sharding != "hsdp" or ranks == 4
]
CASES += [
    {"sharding": sharding, "adapter": "none", "precision": precision, "ranks": ranks, "tp": tp, "pp": pp}
    for precision in ("bf16", "bf16_pure")
    for sharding, ranks, tp, pp in (
        ("none", 2, 2, 1),
        ("fsdp", 4, 2, 1),
        ("none", 2, 1, 2),
        ("none", 4, 1, 4),
        ("fsdp", 4, 1, 2),
        ("none", 4, 2, 2),
    )
]

SMOKE = (2, 26, 30)
"""Cases of a smoke test: FSDP of a whole model, ZeRO-3 of a packed one, and a pipeline."""


def checkpoint(folder: Path, hidden: int) -> Path:
    """Write a Llama with a tokenizer, drawn from a seed."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    shape = {
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8192, max_position_embeddings=512, **shape))
    model.to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>").save_pretrained(folder)
    return folder


class Resident:
    """The process's own memory, looked at every few milliseconds in a thread."""

    def __init__(self) -> None:
        self.base = self.peak = self.now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def now() -> int:
        """Bytes of RssAnon."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * KiB for line in lines if line.startswith("RssAnon:"))

    def _watch(self) -> None:
        while not self._done.wait(0.003):
            self.peak = max(self.peak, self.now())

    def stop(self) -> int:
        """The highest, above what it was at the start."""
        self._done.set()
        self._thread.join()
        return max(self.peak, self.now()) - self.base


def worker(config: dict[str, Any]) -> None:
    """One rank: load, make an optimizer, prepare. Rank 0 writes what that took on each to `out`."""
    import torch
    from accelerate.utils import gather_object

    from toolkit import measurement
    from toolkit.config.strategy import Strategy
    from toolkit.config.train_config import TrainConfig
    from toolkit.core.phases import phase
    from toolkit.forecasting import forecast
    from toolkit.models import describe
    from toolkit.training import loading
    from toolkit.training.preparation import prepare, prepared
    from toolkit.training.setup import accelerator as make

    case = config["case"]
    groups = 2 if case["sharding"] == "hsdp" else 1
    spec, train_config = (
        describe(config["model"]),
        TrainConfig(micro_batch=1, accumulation=case.get("pp", 1), seq_len=64),
    )
    fields = {name: case[name] for name in ("sharding", "adapter", "precision")}
    degrees = {name: case.get(name, 1) for name in ("tp", "pp")}
    strategy = Strategy(**fields, **degrees, dp_replicate=groups)
    # Before the engine is set up: under ZeRO-3 transformers then builds no model on the meta device.
    expected = forecast(spec, strategy, None, train_config, ranks=case["ranks"], allow_unquantized=True, advice=False)
    accelerator = make(strategy, train_config, spec)
    if case["adapter"] != "none":
        import peft.tuners.lora.bnb  # noqa: F401 - code is no part of what a load takes
    accelerator.wait_for_everyone()
    resident, window = Resident(), measurement.start("cpu")
    model, _ = loading.load(accelerator, allow_unquantized=True)
    optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
    objects = prepare(accelerator, model, optimizer)
    gc.collect()
    with phase("step"):  # it begins with what is there
        pass
    own = resident.stop()  # the window's own records come after it
    window.close()
    measured = window.result()
    state = accelerator.job.engine.measure_state(prepared(accelerator, objects))
    found = {
        "phases": measured.phases,
        "resident": own,
        "reason": measured.reason,
        "states": state.parameters + state.master,
        "kept": measured.phases.get("step"),
        "forecast": {phase: expected.phases[phase] for phase in ("load", "prepare")},
    }
    every = gather_object([found])
    if accelerator.is_main_process:
        write(config, every)
    accelerator.end_training()


def measure(case: dict[str, Any], folder: Path, largest: int) -> dict[str, Any]:
    """Run one case in new processes; return its figures by rank, in bytes."""
    ranks = result_of("load_peak:worker", {"case": case, "model": str(folder)}, case["ranks"])
    return {
        **case,
        "reason": ranks[0]["reason"],
        "states_bytes": [rank["states"] for rank in ranks],
        "kept_bytes": [rank["kept"] for rank in ranks],
        "bound_bytes": [int(1.15 * rank["states"]) + largest + 64 * MiB for rank in ranks],
        "load_peak_bytes": [rank["phases"].get("load") for rank in ranks],
        "prepare_peak_bytes": [rank["phases"].get("prepare") for rank in ranks],
        "resident_peak_bytes": [rank["resident"] for rank in ranks],
        "forecast_bytes": max(ranks[0]["forecast"].values()),
    }


def table(results: list[dict[str, Any]], weights: int) -> Table:
    """Return a row for each case, of the fullest rank in each column."""
    names = ("states", "kept", "load_peak", "prepare_peak", "resident_peak", "bound")

    def cells(row: dict[str, Any]) -> list[str]:
        sizes = [max(size or 0 for size in row[f"{name}_bytes"]) for name in names]
        return [f"{size / MiB:.0f}" for size in (*sizes, row["forecast_bytes"])]

    columns = (
        "sharding",
        "adapter",
        "precision",
        "ranks",
        "tp",
        "pp",
        "states",
        "kept",
        "load",
        "prepare",
        "own memory",
        "bound",
        "forecast",
    )
    rows = [(*(row.get(name, 1) for name in columns[:6]), *cells(row)) for row in results]
    title = f"Load peaks of the fullest rank, MiB; {format_bytes(weights * 2)} in bf16. Forecast: of load and prepare"
    return Table(title=title, columns=columns, rows=rows)


def main() -> None:
    """Run every case and write both files."""
    flags = parser(__doc__)
    flags.add_argument("--hidden", type=int, default=1536, help="size of the model")
    flags.add_argument("--only", default="", help="part of a case's name, say fsdp-qlora")
    given = parse(flags, hidden=96)
    from toolkit.models import describe

    cases = [CASES[number] for number in SMOKE] if given.smoke else CASES
    cases = [case for case in cases if given.only in "-".join(map(str, case.values()))]
    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint(Path(scratch), given.hidden)
        spec = describe(folder)
        largest = max(parameter.elements for parameter in spec.parameters) * 2
        facts, results = {**about(), "model": {"parameters": spec.elements, "largest_bytes": largest}}, list[Any]()
        for case in cases:
            results.append(measure(case, folder, largest))
            text, remark = table(results, spec.elements).text(), summary(results)
            write_results(given.results, "load_peak", "Load peaks", {**facts, "results": results}, text, remark)
    print(text)
    print(remark)


def summary(results: list[dict[str, Any]]) -> str:
    """Return how many cases are within the bound."""
    over = [
        row for row in results if max(*row["prepare_peak_bytes"], *row["resident_peak_bytes"]) > min(row["bound_bytes"])
    ]
    return (
        f"{len(results) - len(over)} of {len(results)} cases are within the bound, with both figures. The forecast counts the "
        "moments, too: a run that writes checkpoints makes them before its first step."
    )


if __name__ == "__main__":
    main()
