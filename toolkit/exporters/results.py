"""`Export`: the saved files, and how they were checked."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.core.display import Result, Table
from toolkit.core.units import BYTES_OF, dtype_name, format_bytes
from toolkit.models import ModelSpec
from toolkit.models.hf_loading import auto_class
from toolkit.models.hub import first_line

if TYPE_CHECKING:
    import torch

PROBE_TOKENS = 64
"""The length of the batch on which the logits are compared."""

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
"""Relative error of the logits, ‖saved − trained‖ / ‖trained‖, by compute dtype: a few of its roundings."""

OTHER_KERNELS = 10
"""Times the tolerance, where the saved model computes on another device or with another attention kernel."""


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
    """‖saved − trained‖ / ‖trained‖ of the logits on a probe batch; None where they were not compared: `notes` say why."""
    load: str
    """The Python that loads it."""
    checkpoint: str | None = None
    """The folder that it was made from; None where a running engine held it."""
    step: int | None = None
    """Of the checkpoint, where that says it."""
    notes: tuple[str, ...] = ()
    """What was skipped or converted, and how logits were compared, a sentence each."""

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
"""How the base of an adapter was quantized: over other weights the adapter is another model."""


def load_line(spec: ModelSpec, base: str | None, folder: str, *, adapter: str) -> str:
    """Return the Python line that loads a folder with transformers, or with PEFT on its base.

    Args:
        spec: of the model.
        base: where the base's weights are.
        folder: what was saved.
        adapter: as in Strategy, where an adapter was saved; `none` for a whole model.
    """
    auto = auto_class(spec).__name__
    if adapter == "none":
        return f"{auto}.from_pretrained({folder!r})"
    bits = f", quantization_config={BITS[adapter]}" if adapter in BITS else ""
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


def tolerance_note(error: float, limit: float) -> tuple[str, ...]:
    """Return a note for a model with correct bytes whose logits differ more than usual."""
    if error <= limit:
        return ()
    return (
        f"The saved bytes are the trained ones, but logits differ by {error:.1e} relative; up to {limit:.0e} is usual. "
        "The opened model computes differently, or its forward depends on state that is not saved.",
    )


@dataclass(frozen=True)
class SavedTensor:
    """A tensor on the disk, or as it has to be there."""

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
        """Return the fingerprint of `tensor`, on any device."""
        import torch

        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return cls(dtype_name(tensor.dtype), tuple(tensor.shape), hashlib.sha256(data.numpy().data).hexdigest())


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Written files, compared with the trained model."""

    what: str
    """`model`, `adapter` or `merged model`."""
    tensors: Mapping[str, SavedTensor]
    """In the files, by name."""
    error: float | None
    """As `Export.logits_error`."""
    notes: tuple[str, ...] = ()
    """Sentences about the export."""
