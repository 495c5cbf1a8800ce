"""The support matrix, the cards of model families and the table of strategies, from executed runs and plans.

`make matrix`, `make cards` and `make choose` call this. Results lie in `docs/results/NAME.json`, each with date and versions. What
is there for the installed versions is not run again: a stopped command goes on where it was.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "dist"), str(ROOT / "benchmarks")]

LIBRARIES = ("toolkit", "torch", "accelerate", "transformers", "deepspeed", "peft", "bitsandbytes")
CHUNK = 16
"""Cells of the matrix that one process group runs before their results are written."""

FAMILIES = (
    *("llama", "qwen3", "mixtral", "qwen3_moe", "deepseek", "gpt_oss", "llama4", "ernie", "bloom", "gpt2", "gpt_neox", "phi"),
    *("t5", "glm4_moe", "gemma4", "bart", "qwen3_vl", "llava"),
)  # fmt: skip
"""Models of tests/dist/tiny.py; those of benchmarks/families.py come after them."""


MESHES = {"tp": "llama", "cp": "llama", "ep": "mixtral", "pp": "llama"}
"""A dimension of the mesh → the model of tests/dist/tiny.py that it divides: experts need some."""


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    from importlib import metadata

    from toolkit.core import VERSION

    found = {name: VERSION if name == "toolkit" else metadata.version(name) for name in LIBRARIES}
    return {name: version.partition("+")[0] for name, version in found.items()}


def stored(name: str) -> dict[str, Any]:
    """Return the stored results, by their keys."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def keep(name: str, results: dict[str, Any]) -> None:
    """Write results among the stored ones, with today's date, the versions and the commit."""
    from machine import commit

    from toolkit.core.units import timestamp

    RESULTS.mkdir(exist_ok=True)
    about = {"date": timestamp()[:10], "versions": versions(), "commit": commit()}
    everything = stored(name) | {key: {**result, **about} for key, result in results.items()}
    (RESULTS / f"{name}.json").write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")


def missing(name: str, keys: list[str]) -> list[str]:
    """Return the keys without a result of the installed versions."""
    known = stored(name)
    return [key for key in keys if known.get(key, {}).get("versions") != versions()]


# The matrix --------------------------------------------------------------------------------------------------------------


def cells() -> dict[str, dict[str, Any]]:
    """Return every cell: sharding × adapter × precision, × activation checkpointing, × parallelism, × compile."""
    from toolkit.config.strategy import ADAPTERS, SHARDINGS
    from toolkit.config.tables import PRECISIONS

    found = {}
    for sharding, adapter, precision in itertools.product(SHARDINGS, ADAPTERS, PRECISIONS):
        found[f"{sharding} {adapter} {precision}"] = {"adapter": adapter, "precision": precision}
    for sharding, policy in itertools.product(SHARDINGS, ("none", "selective", "attention", "full", "every:2")):
        found[f"{sharding} checkpointing {policy}"] = {"precision": "fp32", "activation_checkpointing": policy}
    for sharding, mesh, adapter in itertools.product(SHARDINGS, MESHES, ("none", "lora")):
        found[f"{sharding} {mesh} 2 {adapter}"] = {"precision": "fp32", "adapter": adapter, mesh: 2}
    for sharding, (first, second) in itertools.product(("none", "fsdp"), itertools.combinations(MESHES, 2)):
        found[f"{sharding} {first} 2 {second} 2"] = {"precision": "fp32", first: 2, second: 2}
    found |= {f"{sharding} compile": {"precision": "fp32", "compile": True} for sharding in SHARDINGS}
    for key, words in found.items():
        words["sharding"] = key.split()[0]
        words |= {"dp_replicate": 2} if words["sharding"] == "hsdp" else {}
    return found


def refusal(words: dict[str, Any], machine: str = "2x cpu") -> str:
    """Return the sentence that refuses a cell on a machine before a process starts, or an empty string."""
    from toolkit.config.strategy import Strategy
    from toolkit.config.train_config import TrainConfig
    from toolkit.core.errors import ToolkitError
    from toolkit.devices.machine import hardware
    from toolkit.engines.resolution import resolve

    try:
        strategy = Strategy(**words)
        resolve(
            strategy, TrainConfig(accumulation=2 * strategy.pp), None, strategy.least_ranks, hardware(machine).device
        )
    except ToolkitError as error:
        return str(error)
    return ""


def run_matrix(chosen: list[str]) -> None:
    """Run every cell for two steps, on CPU ranks, or keep the sentence that refuses it."""
    import tiny
    from programs import HERE, python

    from toolkit.config.strategy import Strategy

    wanted = {key: words for key, words in cells().items() if not chosen or key.startswith(tuple(chosen))}
    refused = {key: text for key in missing("matrix", list(wanted)) if (text := refusal(wanted[key]))}
    keep("matrix", {key: {"refused": text} for key, text in refused.items()})
    group = {
        key: (Strategy(**wanted[key]).least_ranks, model_of(wanted[key])) for key in missing("matrix", list(wanted))
    }
    with tempfile.TemporaryDirectory(prefix="matrix-") as scratch:
        models = {"llama": tiny.llama(Path(scratch) / "llama", num_hidden_layers=4)}
        models["mixtral"] = tiny.mixtral(Path(scratch) / "mixtral")
        for (ranks, divided), keys in itertools.groupby(
            sorted(group, key=lambda key: group[key]), key=lambda key: group[key]
        ):
            worker = HERE / ("mesh_worker.py" if divided else "matrix_worker.py")
            model = models[divided or "llama"]
            for chunk in _batched(list(keys)):
                folder = Path(scratch) / chunk[0].replace(" ", "-")
                folder.mkdir()
                given = [
                    {"folder": str(model), "strategy": wanted[key], "upto": 2} if divided else wanted[key]
                    for key in chunk
                ]
                (folder / "cells.json").write_text(json.dumps([(ranks, given)]))
                done = python(worker, folder, model)
                path = folder / "results-0.json"
                if not path.exists():
                    sys.exit(done.stdout[-1000:] + done.stderr[-3000:])
                found = dict(zip(chunk, json.loads(path.read_text()), strict=True))
                keep("matrix", {key: one for key in chunk if (one := _outcome(found[key], ranks))})
                print(f"{len(chunk)} cells on {ranks} ranks: {', '.join(chunk)}", flush=True)
                for key in chunk:
                    if "error" in found[key] and "refused" not in found[key]:
                        print(f"{key} failed, and is not kept: {found[key]['error'][-300:]}", file=sys.stderr)


def model_of(words: dict[str, Any]) -> str:
    """Return the name of the model that a cell's mesh divides, or an empty string for a cell of data-parallel ranks alone."""
    return next((MESHES[mesh] for mesh in ("ep", "tp", "cp", "pp") if mesh in words), "")


def _outcome(found: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return what is kept of a cell: its losses, or the sentence that refuses it; nothing of one that failed."""
    if "refused" in found:
        return {"refused": found["refused"], "ranks": ranks}
    losses = found.get("losses") or [step[0] for step in found.get("steps", ())]
    return {"losses": losses, "ranks": ranks} if losses else {}


def _batched(keys: list[str]) -> Iterator[tuple[str, ...]]:
    for start in range(0, len(keys), CHUNK):
        yield tuple(keys[start : start + CHUNK])


def matrix_page() -> str:
    """Return the support matrix."""
    import reference

    found = stored("matrix")
    notes: dict[str, int] = {}

    def cell(key: str) -> str:
        result = found.get(key)
        if result is None:
            return "not run"
        if "losses" in result:
            return "runs"
        number = f"[{notes.setdefault(result['refused'], len(notes) + 1)}](#refusals)"
        return number if refusal(cells()[key], "8x H100-80GB") else f"GPU {number}"

    from toolkit.config.strategy import ADAPTERS, SHARDINGS
    from toolkit.config.tables import PRECISIONS

    parts = ["# Support matrix", "", _made(found, "make matrix")]
    parts += [
        "",
        "«runs»: two steps of a small Llama (with `--ep` a small Mixtral) on CPU ranks, and finite losses. "
        "Those of `--tp`, `--cp`, `--ep` and `--pp` are the same within 1e-5 however the model is divided. "
        "A number: the sentence that refuses it, below.",
    ]
    for precision in PRECISIONS:
        rows = [[f"`{one}`", *(cell(f"{one} {adapter} {precision}") for adapter in ADAPTERS)] for one in SHARDINGS]
        parts += ["", f"## {precision}", "", reference.table(("sharding", *ADAPTERS), rows)]
    policies = ("none", "selective", "attention", "full", "every:2")
    rows = [[f"`{one}`", *(cell(f"{one} checkpointing {policy}") for policy in policies)] for one in SHARDINGS]
    parts += ["", "## Activation checkpointing, fp32", "", reference.table(("sharding", *policies), rows)]
    columns = [f"{mesh} 2 {adapter}" for mesh, adapter in itertools.product(MESHES, ("none", "lora"))]
    heads = [f"`--{mesh} 2`{more}" for mesh, more in itertools.product(MESHES, ("", " LoRA"))]
    rows = [[f"`{one}`", *(cell(f"{one} {column}") for column in (*columns, "compile"))] for one in SHARDINGS]
    parts += ["", "## Parallelism and compile, fp32", "", reference.table(("sharding", *heads, "`--compile`"), rows)]
    pairs = list(itertools.combinations(MESHES, 2))
    rows = [
        [f"`--{first} 2 --{second} 2`", *(cell(f"{one} {first} 2 {second} 2") for one in ("none", "fsdp"))]
        for first, second in pairs
    ]
    parts += ["", "## Two dimensions at once, fp32", "", reference.table(("flags", "`none`", "`fsdp`"), rows)]
    parts += ["", "## Refusals", "", *(f"{number}. {text}" for text, number in notes.items())]
    return "\n".join(parts) + "\n"


def _made(found: dict[str, Any], command: str) -> str:
    """Return when, with what and how results were made."""
    if not found:
        return f"No result is stored. `{command}` makes them."
    newest = max(found.values(), key=lambda one: one["date"])
    libraries = ", ".join(f"{name} {version}" for name, version in newest["versions"].items())
    commits = sorted({one["commit"][:12] for one in found.values() if "commit" in one})
    named = f" The newest results are of commit {', '.join(commits)}." if commits else ""
    return f"Executed until {newest['date']} with {libraries}.{named} `{command}` makes it, and goes on where it was stopped."


# Cards of families -------------------------------------------------------------------------------------------------------


def family_folders(root: Path) -> dict[str, Any]:
    """Return each family's function that writes a small model into a folder."""
    import tiny

    return {name: getattr(tiny, name) for name in FAMILIES} | {
        name.lower().replace("-", "_") + "_512": name for name in _grid_families()
    }


def _grid_families() -> list[str]:
    import families

    return [*families.FAMILIES, *families.RECENT]


def run_cards(chosen: list[str]) -> None:
    """Train each family with the command line, resume it, and export it. One card each."""
    with tempfile.TemporaryDirectory(prefix="cards-") as place:
        makers = family_folders(Path(place))
        for name in missing("families", [name for name in makers if not chosen or name.startswith(tuple(chosen))]):
            keep("families", {name: card(name, makers[name], Path(place) / name)})
            print(name, flush=True)


def card(name: str, maker: Any, folder: Path) -> dict[str, Any]:
    """Train four steps at once, and two and two with a resume between; export the second run's checkpoint."""
    import tiny
    from programs import python

    from toolkit.comparison import read_run

    folder.mkdir()
    if callable(maker):
        model = maker(folder / "model")
    else:
        import families
        import torch
        from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

        config = families.config_of(maker, "deep")
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        assert AutoModel
        torch.manual_seed(0)
        model = folder / "model"
        kind.from_config(config).save_pretrained(model)
        tiny.save_tokenizer(model)
    data = folder / "words.txt"
    data.write_text(" ".join(f"w{(7 * number + number // 5) % 240}" for number in range(4000)))
    words = ["--sharding", "fsdp", "--processes", "2", "--seq-len", "32", "--micro-batch", "2", "--precision", "fp32"]
    words += ["--activation-checkpointing", "none"]
    command = ["train", "--model", "MODEL", "--data", "DATA", *words, "--steps", "4"]

    def toolkit(*line: object) -> str:
        done = python("-m", "toolkit.cli", *line, cwd=folder)
        return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]

    given = [str({"MODEL": model, "DATA": data}.get(word, word)) for word in command]
    result: dict[str, Any] = {"command": "toolkit " + " ".join(command)}
    if reason := toolkit(*given, "--run-dir", folder / "whole"):
        return {**result, "refused": reason.replace(str(folder), "")}
    run = read_run(folder / "whole")
    measured, forecast = (
        (run.measured or {}).get("peak_bytes"),
        (run.forecast or {}).get("device", {}).get("peak_bytes"),
    )
    result |= {"losses": list(run.losses), "engine": run.engine, "peak_bytes": measured, "forecast_bytes": forecast}
    reason = toolkit(*given, "--save-every", 2, "--keep", 2, "--run-dir", folder / "parts")
    checkpoints = sorted((folder / "parts" / "checkpoints").glob("step-*"))
    if not reason:
        import shutil

        for later in checkpoints[1:]:
            shutil.rmtree(later)
        reason = toolkit("resume", folder / "parts")
    again = read_run(folder / "parts").losses if not reason else ()
    apart = max((abs(mine - whole) / whole for mine, whole in zip(again, run.losses, strict=False)), default=0.0)
    words = "the same losses" if list(again) == list(run.losses) else f"losses within {apart:.0e} (relative)"
    result["resume"] = reason or words
    result["export"] = toolkit("export", folder / "whole", "-o", folder / "out") or "opened again, equal"
    return result


def cards_page() -> str:
    """Return the cards of families, in one table."""
    import reference

    found = stored("families")
    rows = []
    for name, one in sorted(found.items()):
        if "refused" in one:
            rows.append((f"`{name}`", one["refused"], "", "", "", ""))
            continue
        losses = f"{one['losses'][0]:.3f} → {one['losses'][-1]:.3f}"
        peak, ratio = one["peak_bytes"], one["forecast_bytes"] / one["peak_bytes"]
        rows.append((f"`{name}`", losses, f"{peak / 2**20:.1f} MiB", f"× {ratio:.3f}", one["resume"], one["export"]))
    columns = ("family", "loss, 4 steps", "measured peak", "forecast", "resume after step 2", "export")
    parts = ["# Model families", "", _made(found, "make cards"), ""]
    if found:
        command = next(iter(found.values()))["command"]
        parts += [
            f"{len(found)} cards, of families with few layers and features. Models with `_512` in their names are wider and "
            "deeper. Each is a random model, trained with this command:",
            "",
            f"```text\n{command}\n```",
            "",
        ]
        parts += [reference.table(columns, rows), ""]
    return "\n".join(parts) + "\n"


# The table of strategies -------------------------------------------------------------------------------------------------

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192}
QWEN = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "num_key_value_heads": 8}
MODELS: dict[str, dict[str, Any]] = {
    "0.6B (Qwen3)": {
        **QWEN, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "8B (Qwen3)": {
        **QWEN, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "vocab_size": 151936,
    },
    "70B (Llama 3)": {
        **LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
}  # fmt: skip
"""The published configs of these models, without what memory does not depend on."""

MACHINES = ("T4", "RTX-4090", "A100-80GB", "8x A100-80GB", "8x H100-80GB", "4 nodes x 8x H100-80GB")
SEQ_LEN, GLOBAL_BATCH = 2048, 64


def run_choose(chosen: list[str]) -> None:
    """Plan each model on each machine."""
    import toolkit as tk

    keys = [f"{model} on {machine}" for model in MODELS for machine in MACHINES]
    for key in missing("choose", [key for key in keys if not chosen or key.startswith(tuple(chosen))]):
        model, machine = key.split(" on ")
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODELS[model]))
            config = tk.TrainConfig(seq_len=SEQ_LEN)
            plan = tk.plan(tk.describe(folder), tk.hardware(machine), global_batch=GLOBAL_BATCH, train_config=config)
        best = plan.ranked[0] if plan.ranked else None
        forecast = best.forecast if best else None
        keep("choose", {key: {
            "cells": dict(best.cells) if best else None,
            "needed_bytes": forecast.needed_bytes if forecast else None,
            "limit_bytes": forecast.limit_bytes if forecast else None,
            "tokens_per_second": forecast.tokens_per_second if forecast else None,
            "alternatives": [one.flags for one in plan.alternatives],
        }})  # fmt: skip
        print(key, flush=True)


def choose_table() -> str:
    """Return the fastest strategy that fits, by model and machine."""
    import reference

    found, parts = stored("choose"), []
    for model in MODELS:
        rows = []
        for machine in MACHINES:
            one = found.get(f"{model} on {machine}")
            if one is None:
                continue
            if one["cells"] is None:
                # Of changes with smaller devices or more of them, the first without either says more.
                fits = ", ".join(f"`{flags}`" for flags in one["alternatives"][:2]) or "nothing that `plan` tries"
                rows.append((machine, "nothing fits", "", "", f"with {fits}"))
                continue
            need = f"{one['needed_bytes'] / 2**30:.1f} of {one['limit_bytes'] / 2**30:.1f} GiB"
            text = f"`--sharding {one['cells']['sharding']}`"
            if one["cells"]["offload"] != "none":
                text += f" `--offload {one['cells']['offload']}`"
            more = f"recompute {one['cells']['recompute']}, batch {one['cells']['batch']}"
            rows.append((machine, text, f"{one['tokens_per_second']:,.0f}", need, more))
        if rows:
            parts += [
                f"### {model}",
                "",
                reference.table(("machine", "fastest that fits", "tokens/s", "need", "with"), rows),
                "",
            ]
    note = f"Full fine-tuning, {SEQ_LEN:,} tokens a row, {GLOBAL_BATCH} rows a step. "
    return note + _made(found, "make choose") + "\n\n" + "\n".join(parts)


def pages() -> dict[str, str]:
    """Return the pages of results."""
    return {"matrix.md": matrix_page(), "families.md": cards_page()}


if __name__ == "__main__":
    {"matrix": run_matrix, "cards": run_cards, "choose": run_choose}[sys.argv[1]](sys.argv[2:])
