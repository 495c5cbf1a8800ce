"""Checkpoints that this toolkit did not write: DeepSpeed's and Accelerate's, read without running a byte of them."""

from toolkit.foreign.opening import open_foreign
from toolkit.foreign.weights import Weights

__all__ = ["Weights", "open_foreign"]
