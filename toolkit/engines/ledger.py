"""The memory of a rank by part while a step is simulated, and its peak in each phase."""

from __future__ import annotations

from collections import Counter

PARTS = ("parameters", "master", "gradients", "optimizer", "activations", "logits", "buffers", "workspace")


class Ledger:
    """Bytes by part. Every change is one call; the highest totals follow from the calls."""

    def __init__(self, *, shared: bool = False) -> None:
        """Start empty. `shared`: the device's memory is the host's, so offloaded states stay in it."""
        self.shared = shared
        self.host = 0
        """The host's memory of one rank, if its device has its own."""
        self.rank0_bytes = 0
        """The additional host memory of rank 0."""
        self._host_peaks: dict[int, int] = {}
        """`rank0_bytes` → the highest host memory of each rank meanwhile."""
        self.held: Counter[str] = Counter()
        self.total = 0
        self.phase = "load"
        self.phases: dict[str, int] = {}
        self._high = -1
        """The highest total in this phase so far. Lower totals are skipped: a plan makes half a million changes."""
        self.peak = 0
        self.peak_phase = "load"
        self.parts: dict[str, int] = {}

    def enter(self, phase: str) -> None:
        """Begin a phase. Bytes that are held now count in it."""
        self.phase = phase
        self._high = self.phases.get(phase, -1)
        self._look(0, "workspace")

    def hold(self, part: str, size: int) -> None:
        """Hold `size` more bytes of a part; less if `size` is negative."""
        self.held[part] += size
        self.total += size
        if self.total > self._high:
            self._look(0, part)

    def touch(self, part: str, size: int) -> None:
        """Hold `size` more bytes of a part for a moment."""
        self._look(size, part)

    def walk(self, rise: int, net: int, logits_rise: int = 0, logits_net: int = 0) -> None:
        """Add activations that rise by `rise` and end at `net`; the last two arguments are the logits among them."""
        if self.total + rise > self._high:
            self._look(rise, "activations", logits_rise)
        if net or logits_net:
            self.held["activations"] += net - logits_net
            self.held["logits"] += logits_net
            self.total += net

    def offload(self, part: str, size: int) -> None:
        """Hold bytes in the host's memory."""
        if self.shared:
            self.hold(part, size)
        self.host += size
        self._look_host()

    def touch_host(self, part: str, size: int) -> None:
        """Hold bytes in the host's memory for a moment."""
        if self.shared:
            self.touch(part, size)
        self._look_host(size)

    def rank0_host(self, size: int) -> None:
        """Hold bytes in the host's memory on rank 0 alone: it reads and writes for all ranks."""
        self.rank0_bytes += size
        self._look_host()

    def node_peak(self, ranks: int) -> int:
        """Return the highest need of the host of rank 0's node, which has `ranks` ranks.

        Where host and device are one memory, every rank's peak counts.
        """
        extra = max(self._host_peaks, default=0)
        if self.shared:
            return ranks * self.peak + extra
        return max((ranks * host + rank0 for rank0, host in self._host_peaks.items()), default=0)

    def _look_host(self, more: int = 0) -> None:
        highest = self._host_peaks.get(self.rank0_bytes, 0)
        self._host_peaks[self.rank0_bytes] = max(highest, self.host + more)

    def _look(self, more: int, part: str, logits: int = 0) -> None:
        total = self.total + more
        if total > self._high:
            self.phases[self.phase] = self._high = total
        if total > self.peak:
            self.peak, self.peak_phase = total, self.phase
            self.parts = self._parts(more, part, logits)

    def _parts(self, more: int, part: str, logits: int) -> dict[str, int]:
        """Return the held bytes with `more` of a part, of which `logits` are logits."""
        parts = {**self.held, part: self.held[part] + more - logits}
        return {**parts, "logits": self.held["logits"] + logits} if logits else parts


class LedgerHistory(Ledger):
    """A ledger with a history: the parts at the peak of each phase, and the total after every change."""

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__(shared=shared)
        self.highest: dict[str, dict[str, int]] = {}
        """Phase → parts, at its highest moment."""
        self.moments: list[tuple[str, int]] = []
        """Phase and total, in order; a momentary total has an entry of its own."""

    def enter(self, phase: str) -> None:
        super().enter(phase)
        self.moments.append((phase, self.total))

    def hold(self, part: str, size: int) -> None:
        super().hold(part, size)
        self.moments.append((self.phase, self.total))

    def walk(self, rise: int, net: int, logits_rise: int = 0, logits_net: int = 0) -> None:
        if rise > max(net, 0):
            self.moments.append((self.phase, self.total + rise))
        super().walk(rise, net, logits_rise, logits_net)
        self.moments.append((self.phase, self.total))

    def _look(self, more: int, part: str, logits: int = 0) -> None:
        before = self.phases.get(self.phase, -1)
        super()._look(more, part, logits)
        if self.phases[self.phase] > before:
            self.highest[self.phase] = self._parts(more, part, logits)
        if more:
            self.moments += [(self.phase, self.total + more), (self.phase, self.total)]
