"""What each rank holds at the most while a model is loaded and prepared, and which way of loading that was.

    python benchmarks/load_peak.py                     # results into benchmarks/results/load_peak.json and .md
    python benchmarks/load_peak.py --smoke             # whether it still runs

Each line is one run, over a Llama of about 200 MiB in fp32. Three figures a rank: the CPU allocator's highest total
in the phases load and prepare, and the process's own memory (RssAnon: pages of a file that is only mapped, which all
ranks of a machine share, are not in it), above what it had before the first tensor.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

from forking import result_of, write
from machine import about, parse, parser, write_results

from toolkit.core.display import Table
from toolkit.core.units import KiB, MiB, format_bytes

CASES = [
    {"sharding": sharding, "precision": precision, "stored": stored, "ranks": ranks, "way": way}
    for precision, stored in (("fp32", "float32"), ("bf16", "bfloat16"))
    for sharding, way in (("ddp", "toolkit"), ("zero3", "toolkit"), ("fsdp", "toolkit"), ("fsdp", "transformers"))
    for ranks in (2, 4)
]
"""`way`: `transformers` is FSDP with `fsdp_cpu_ram_efficient_loading` as transformers itself reads it."""

SMOKE = (10, 14)
"""Cases of a smoke test: ZeRO-3, and FSDP as transformers reads it."""


def checkpoint(folder: Path, dtype: str, hidden: int) -> Path:
    """A Llama with a tokenizer, drawn from a seed."""
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
    model.to(getattr(torch, dtype)).save_pretrained(folder)
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
    from toolkit.models import describe
    from toolkit.training import loading
    from toolkit.training.preparation import prepare
    from toolkit.training.setup import accelerator as make

    case = config["case"]
    if case["way"] == "transformers":
        loading.Reader.read_on_main = loading.Reader.read  # type: ignore[method-assign]
    spec = describe(config["model"])
    accelerator = make(
        Strategy(sharding=case["sharding"], precision=case["precision"]), TrainConfig(micro_batch=1, seq_len=64), spec
    )
    said: list[str] = []
    accelerator.print = said.append
    accelerator.wait_for_everyone()
    resident, window = Resident(), measurement.start("cpu")
    model, _ = loading.load(accelerator)
    optimizer = torch.optim.AdamW(model.parameters())
    prepare(accelerator, model, optimizer)
    window.close()
    measured = window.result()
    found = {"phases": measured.phases, "resident": resident.stop(), "reason": measured.reason, "said": said[:1]}
    every = gather_object([found])
    if accelerator.is_main_process:
        write(config, every)
    accelerator.end_training()


def measure(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One case in new processes: its figures by rank, in bytes."""
    found = result_of("load_peak:worker", {"case": case, "model": str(folder)}, case["ranks"])
    return {
        **case,
        "loading": (found[0]["said"][0] if found[0]["said"] else "").removeprefix("loading: "),
        "reason": found[0]["reason"],
        "load_peak_bytes": [one["phases"].get("load") for one in found],
        "prepare_peak_bytes": [one["phases"].get("prepare") for one in found],
        "resident_peak_bytes": [one["resident"] for one in found],
    }


def table(results: list[dict[str, Any]], weights: int) -> Table:
    """A row a case: rank 0, and the most of the others."""

    def cell(sizes: list[int | None]) -> str:
        known = [size or 0 for size in sizes]
        return f"{known[0] / MiB:.0f} / {max(known[1:]) / MiB:.0f}"

    columns = ("sharding", "read by", "checkpoint", "ranks", "load", "prepare", "own memory")
    rows = [
        (
            row["sharding"],
            row["way"],
            row["stored"],
            row["ranks"],
            cell(row["load_peak_bytes"]),
            cell(row["prepare_peak_bytes"]),
            cell(row["resident_peak_bytes"]),
        )
        for row in results
    ]
    title = f"Load peaks, MiB: rank 0 / the most of the others; {format_bytes(weights * 4)} in fp32"
    return Table(title=title, columns=columns, rows=rows)


def main() -> None:
    """Run every case and write both files."""
    flags = parser(__doc__)
    flags.add_argument("--hidden", type=int, default=768, help="size of the model")
    given = parse(flags, hidden=96)
    from toolkit.models import describe

    cases = [CASES[number] for number in SMOKE] if given.smoke else CASES
    with tempfile.TemporaryDirectory() as scratch:
        folders = {dtype: checkpoint(Path(scratch, dtype), dtype, given.hidden) for dtype in ("float32", "bfloat16")}
        weights = describe(folders["float32"]).elements
        results = [measure(case, folders[str(case["stored"])]) for case in cases]
    text = table(results, weights).text()
    ways = {f"{row['sharding']}, read by {row['way']}": row["loading"] for row in results if row["way"] == "toolkit"}
    result = {**about(), "model": {"parameters": weights, "bytes_fp32": weights * 4}, "results": results}
    remarks = "\n".join(f"- {name}: {way}" for name, way in ways.items())
    write_results(given.results, "load_peak", "Load peaks", result, text, remarks)
    print(text)


if __name__ == "__main__":
    main()
