"""What was trained, as Hugging Face files: whole, or its adapter alone; out of a running engine, or offline from a checkpoint."""

from toolkit.exporting.card import spelled
from toolkit.exporting.offline import export
from toolkit.exporting.results import Export, logits_text
from toolkit.exporting.trained import save, verify

__all__ = ["Export", "export", "logits_text", "save", "spelled", "verify"]
