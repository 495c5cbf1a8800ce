"""What a rank holds, part by part, while a step is replayed; and the most that it held, phase by phase."""

from __future__ import annotations

from collections import Counter

PARTS = ("parameters", "master", "gradients", "optimizer", "activations", "logits", "buffers", "workspace")


class Ledger:
    """Bytes by part. Every change is one call; the highest totals follow from the calls."""

    def __init__(self, *, shared: bool = False) -> None:
        """`shared`: a rank's device is the host's memory, so what is offloaded stays in it."""
        self.shared = shared
        self.host = self.host_peak = 0
        """Of a rank, where its device has a memory of its own."""
        self.alone = self.alone_peak = 0
        """What of the host's memory rank 0 alone takes beside that."""
        self.held: Counter[str] = Counter()
        self.total = 0
        self.phase = "load"
        self.phases: dict[str, int] = {}
        self._high = -1
        """The most in this phase so far: only what is more needs a look. A plan makes half a million changes."""
        self.peak = 0
        self.peak_phase = "load"
        self.parts: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        """What follows belongs to this phase, and so does what is held as it begins."""
        self.phase = phase
        self._high = self.phases.get(phase, -1)
        self._look(0, "workspace")

    def hold(self, part: str, size: int) -> None:
        """More of a part, or less where `size` is negative."""
        self.held[part] += size
        self.total += size
        if self.total > self._high:
            self._look(0, part)

    def touch(self, part: str, size: int) -> None:
        """For a moment `size` bytes more of a part."""
        self._look(size, part)

    def walk(self, rise: int, net: int, logits_rise: int = 0, logits_net: int = 0) -> None:
        """Activations that rise and then change by `net`, which is at most their rise; of both so much are logits."""
        if self.total + rise > self._high:
            self._look(rise, "activations", logits_rise)
        if net or logits_net:
            self.held["activations"] += net - logits_net
            self.held["logits"] += logits_net
            self.total += net

    def offload(self, part: str, size: int) -> None:
        """As `hold`, in the host's memory."""
        if self.shared:
            self.hold(part, size)
        self.host += size
        self.host_peak = max(self.host, self.host_peak)

    def touch_host(self, part: str, size: int) -> None:
        """As `touch`, in the host's memory."""
        if self.shared:
            self.touch(part, size)
        self.host_peak = max(self.host + size, self.host_peak)

    def lead(self, size: int) -> None:
        """More, or less, of the host's memory that rank 0 alone takes: where it reads for all, or writes for all."""
        self.alone += size
        self.alone_peak = max(self.alone, self.alone_peak)

    def _look(self, more: int, part: str, logits: int = 0) -> None:
        total = self.total + more
        if total > self._high:
            self.phases[self.phase] = self._high = total
        if total > self.peak:
            self.peak, self.peak_phase = total, self.phase
            self.parts = {**self.held, part: self.held[part] + more - logits}
            if logits:
                self.parts["logits"] = self.held["logits"] + logits
