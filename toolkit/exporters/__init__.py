"""Export a trained model or its adapter as Hugging Face files, from a running engine or from a checkpoint."""

from toolkit.exporters.from_engine import save, try_save, verify
from toolkit.exporters.generation import generate
from toolkit.exporters.offline import export
from toolkit.exporters.results import Export, format_versions, logits_text

__all__ = ["Export", "export", "format_versions", "generate", "logits_text", "save", "try_save", "verify"]
