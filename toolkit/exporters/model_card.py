"""The model card: the exported model, its training, and how to load it."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoints import Manifest
from toolkit.config.parallelism import Parallelism
from toolkit.config.run_config import EMBEDDED
from toolkit.config.strategy import Strategy
from toolkit.core.atomic_io import expand_user
from toolkit.core.display import Table
from toolkit.core.redaction import redact
from toolkit.exporters.results import Checked, Export, load_line, logits_text
from toolkit.models import ModelSpec


def finish_export(
    draft: Path, spec: ModelSpec, checked: Checked, *, trained: str, rows: Mapping[str, Any], folder: Path
) -> Export:
    """Write `README.md`, with the header that the Hugging Face Hub reads, and return the result.

    The card names no path of this machine.

    Args:
        draft: where the files are now.
        spec: of the model that was trained.
        checked: the files.
        trained: the adapter that was trained, as in Strategy.
        rows: what it was trained with; those that are None are left out.
        folder: where the files will be.
    """
    from huggingface_hub import ModelCard, ModelCardData

    adapter, base = checked.what == "adapter", base_name(spec)
    loaded = trained if adapter else "none"
    on_hub = spec.source is not None and base == spec.name != EMBEDDED
    header = ModelCardData(
        library_name="peft" if adapter else "transformers",
        base_model=base if on_hub else None,
        base_model_relation=("adapter" if adapter else "finetune") if on_hub else None,
        pipeline_tag="text-generation" if spec.kind == "causal" else None,
        tags=["accelerate-toolkit", *(["lora"] if adapter else [])],
    )
    load = load_line(spec, base, "this folder", adapter=loaded)
    auto = next(word for word in load.replace("(", ".").split(".") if word.startswith("AutoModel"))
    bits = ", BitsAndBytesConfig" if "BitsAndBytesConfig" in load else ""
    imports = [f"from transformers import {auto}{bits}", *(["from peft import PeftModel"] if adapter else [])]
    table = Table(columns=("what", "value"), rows=[(name, value) for name, value in rows.items() if value is not None])
    text = table.text()
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))  # no cell ends the block
    parts = [
        f"---\n{header.to_yaml()}\n---",
        f"# {checked.what.capitalize()} trained from {base}",
        f"{spec.architecture}, {spec.elements:,} parameters.",
        *checked.notes,
        "## How it was trained",
        f"{fence}text\n{text}\n{fence}",
        "## How to load it",
        "```python\n" + "\n".join([*imports, "", f"model = {load}"]) + "\n```",
        f"Checked when it was saved. Logits on a probe batch against the trained model: {logits_text(checked.error)}.",
    ]
    ModelCard(redact("\n\n".join(parts) + "\n")).save(draft / "README.md")
    return Export(
        folder=str(folder),
        adapter=adapter,
        tensors=len(checked.tensors),
        size_bytes=sum(tensor.nbytes for tensor in checked.tensors.values()),
        logits_error=checked.error,
        load=load_line(spec, spec.source, str(folder), adapter=loaded),
        notes=checked.notes,
    )


def base_name(spec: ModelSpec) -> str:
    """Return the Hub id of the base model, or the last part of its folder's name; no whole path."""
    if spec.name == EMBEDDED or not os.path.exists(expand_user(spec.name)):
        return spec.name
    source = spec.source or spec.name
    return Path(source).name if expand_user(source).is_dir() else source


def rows_of(
    strategy: Mapping[str, Any], train_config: Mapping[str, Any], parallelism: Parallelism, steps: int
) -> dict[str, Any]:
    """Return the settings of a training for the card, without data and versions, from fields of both dataclasses."""
    default = dataclasses.asdict(Strategy())
    fields = [f"{name} {value}" for name, value in strategy.items() if value != default[name] and name != "sharding"]
    batch = train_config["micro_batch"] * train_config["accumulation"] * parallelism.dp_size
    return {
        "strategy": ", ".join([f"sharding {strategy['sharding']} on {parallelism.ranks} rank(s)", *fields]),
        "steps": steps,
        "global batch": f"{batch} sequences of {train_config['seq_len']} tokens",
        "optimizer": f"{train_config['optimizer']}, learning rate {train_config['lr']:g}, {train_config['warmup']} steps of warmup",
        "seed": train_config["seed"],
    }


def manifest_rows(manifest: Manifest) -> dict[str, Any]:
    """Return the card's settings from a checkpoint's manifest."""
    identity, parallelism = manifest.identity, Parallelism(**manifest.parallelism)
    return {
        **rows_of(manifest.strategy, manifest.train_config, parallelism, manifest.step),
        "data": f"fingerprint {identity['data']}",
        "base revision": (identity.get("base") or {}).get("revision"),
        "versions": format_versions(manifest.versions),
        "checkpoint written": manifest.written,
    }


def format_versions(versions: Mapping[str, str | None]) -> str | None:
    """Return the installed libraries with their versions."""
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version) or None
