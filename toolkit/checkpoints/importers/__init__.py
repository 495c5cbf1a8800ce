"""Checkpoints that this toolkit did not write: DeepSpeed's and Accelerate's, read without running a byte of them."""

from toolkit.checkpoints.importers.detection import open_foreign
from toolkit.checkpoints.importers.weights import Entry, Weights, safetensors_entries

__all__ = ["Entry", "Weights", "open_foreign", "safetensors_entries"]
