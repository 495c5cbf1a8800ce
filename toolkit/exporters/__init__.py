"""What was trained, as Hugging Face files: whole, or its adapter alone; out of a running engine, or offline from a checkpoint."""

from toolkit.exporters.from_engine import save, verify
from toolkit.exporters.model_card import spelled
from toolkit.exporters.offline import export
from toolkit.exporters.results import Export, logits_text

__all__ = ["Export", "export", "logits_text", "save", "spelled", "verify"]
