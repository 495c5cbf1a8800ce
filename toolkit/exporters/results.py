"""`Export`: the saved files and the checks of them, and their model card."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoints import Manifest
from toolkit.config.parallelism import Parallelism
from toolkit.config.run_config import EMBEDDED
from toolkit.config.strategy import Strategy
from toolkit.core.atomic_io import expand_user
from toolkit.core.display import Result, Table
from toolkit.core.redaction import redact
from toolkit.core.units import BYTES_OF, dtype_name, format_bytes
from toolkit.models import ModelSpec
from toolkit.models.files import first_line
from toolkit.models.hf_loading import auto_class

if TYPE_CHECKING:
    import torch

PROBE_TOKENS = 64
"""The length of the batch on which the logits are compared."""

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
"""Relative error of the logits, ‖saved − trained‖ / ‖trained‖, by compute dtype: a few of its roundings."""

OTHER_KERNELS = 10
"""Factor of the tolerance on another device or with another attention kernel."""


@dataclass(frozen=True, kw_only=True)
class Export(Result):
    """The saved files, and how they were checked."""

    folder: str
    adapter: bool
    """Whether it is an adapter, to be loaded over its base model."""
    tensors: int
    size_bytes: int
    """Of the safetensors files."""
    logits_error: float | None
    """‖saved − trained‖ / ‖trained‖ of the logits on a probe batch; None without a comparison, with the reason in `notes`."""
    load: str
    """The Python that loads it."""
    checkpoint: str | None = None
    """The exported checkpoint; None for the export of a running engine."""
    step: int | None = None
    """Step of the checkpoint, if known."""
    notes: tuple[str, ...] = ()
    """Skipped checkpoints, conversions, and the comparison of logits, a sentence each."""

    def tables(self) -> list[Table]:
        what = "adapter" if self.adapter else "model"
        step = f", after step {self.step}" if self.step is not None else ""
        rows = [
            ("folder", self.folder),
            *([("made from", f"{self.checkpoint}{step}")] if self.checkpoint else []),
            ("holds", f"{what}, {self.tensors} tensors, {format_bytes(self.size_bytes)}"),
            ("logits against the trained model", logits_text(self.logits_error)),
            ("load it with", self.load),
        ]
        return [Table(title="Saved and checked", columns=("what", "value"), rows=rows, notes=self.notes)]


BITS = {
    "qlora": "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True)",
    "qlora8": "BitsAndBytesConfig(load_in_8bit=True)",
}
"""Adapter → quantization of its base. Over other weights the adapter is another model."""


def load_line(spec: ModelSpec, base: str | None, folder: str, *, adapter: str) -> str:
    """Return the Python line that loads a folder with transformers, or with PEFT on its base.

    Args:
        spec: of the model.
        base: where the base's weights are.
        folder: the saved files.
        adapter: as in Strategy; `none` for a whole model.
    """
    auto = auto_class(spec).__name__
    if adapter == "none":
        return f"{auto}.from_pretrained({folder!r})"
    bits = f", quantization_config={BITS[adapter]}" if adapter in BITS and not spec.quantization else ""
    return f"PeftModel.from_pretrained({auto}.from_pretrained({base!r}{bits}), {folder!r})"


def logits_text(error: float | None) -> str:
    """Describe the error of the logits."""
    return "not compared" if error is None else f"{error:.1e} relative"


NO_ROOM = (
    "Logits were not compared: there is too little memory for the whole model. The saved bytes are the trained ones."
)


def not_compared(problem: Exception, folder: Path, *, opened: bool) -> str:
    """Return a note for a saved model with correct bytes that cannot compute here; a warning if it does not open."""
    reason = f"{type(problem).__name__}: {first_line(problem)}".replace(str(folder), ".")
    if opened:
        return f"Logits were not compared ({reason}). The saved bytes are the trained ones."
    return (
        f"Warning: the saved folder does not open ({reason}). The saved bytes are the trained ones; logits were not"
        " compared."
    )


def logits_notes(error: float | None, limit: float) -> tuple[str, ...]:
    """Return a note for correct bytes with logits that were not compared, or that differ more than usual."""
    if error is None:
        return (NO_ROOM,)
    if error <= limit:
        return ()
    return (
        f"The saved bytes are the trained ones, but logits differ by {error:.1e} relative; up to {limit:.0e} is usual. "
        "The opened model computes differently, or its forward depends on state that is not saved.",
    )


@dataclass(frozen=True)
class SavedTensor:
    """Fingerprint of a saved tensor, expected or on the disk."""

    dtype: str
    """torch's name."""
    shape: tuple[int, ...]
    sha256: str
    """Of its bytes."""

    @property
    def nbytes(self) -> int:
        """Its size on the disk."""
        return BYTES_OF[self.dtype] * math.prod(self.shape)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SavedTensor:
        """Return the fingerprint of a tensor on any device."""
        import torch

        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return cls(dtype_name(tensor.dtype), tuple(tensor.shape), hashlib.sha256(data.numpy().data).hexdigest())


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Written files and their comparison with the trained model."""

    what: str
    """`model`, `adapter` or `merged model`."""
    tensors: Mapping[str, SavedTensor]
    """In the files, by name."""
    error: float | None
    """As `Export.logits_error`."""
    notes: tuple[str, ...] = ()
    """Sentences about the export."""


def finish_export(
    draft: Path, spec: ModelSpec, checked: Checked, *, trained: str, rows: Mapping[str, Any], folder: Path
) -> Export:
    """Write `README.md`, with the header that the Hugging Face Hub reads, and return the result.

    The card names no path of this machine.

    Args:
        draft: the files' folder until they are published.
        spec: of the trained model.
        checked: the files.
        trained: the trained adapter, as in Strategy.
        rows: settings of the training; rows with None are left out.
        folder: the files' final folder.
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
        "strategy": ", ".join([f"sharding {strategy['sharding']}, ranks {parallelism.ranks}", *fields]),
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
