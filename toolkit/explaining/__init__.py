"""What a choice costs, and why: two forecasts side by side, a step phase by phase, and who keeps what in which dtype.

Each is a pure function whose result shows itself. The shell's `forecast --against`, `timeline` and `precisions` ask them, and
so do a notebook's panels.
"""

from toolkit.explaining.contrasts import Contrast, Difference, contrast
from toolkit.explaining.ledgers import Column, Precisions, precisions
from toolkit.explaining.timelines import Timeline, timeline

__all__ = ["Column", "Contrast", "Difference", "Precisions", "Timeline", "contrast", "precisions", "timeline"]
