"""What a rank holds, part by part, while a step is replayed; and the most that it held, phase by phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

PARTS = ("parameters", "master", "gradients", "optimizer", "activations", "logits", "buffers", "workspace")


class Ledger:
    """Bytes by part. Every change is one call; the highest totals follow from the calls."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.total = 0
        self.phase = "load"
        self.phases: dict[str, int] = {}
        self.peak = 0
        self.peak_phase = "load"
        self.parts: Mapping[str, int] = {}

    def enter(self, phase: str) -> None:
        """What follows belongs to this phase, and so does what is held as it begins."""
        self.phase = phase
        self._look(0, "workspace")

    def hold(self, part: str, size: int) -> None:
        """More of a part, or less where `size` is negative."""
        self.held[part] += size
        self.total += size
        self._look(0, part)

    def touch(self, part: str, size: int) -> None:
        """For a moment `size` bytes more of a part."""
        self._look(size, part)

    def _look(self, more: int, part: str) -> None:
        total = self.total + more
        self.phases[self.phase] = max(total, self.phases.get(self.phase, 0))
        if total > self.peak:
            self.peak, self.peak_phase = total, self.phase
            self.parts = {**self.held, part: self.held[part] + more}
