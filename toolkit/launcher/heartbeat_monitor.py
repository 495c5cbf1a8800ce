"""The supervisor's view of the ranks' heartbeats: silent, stalled and dead ranks."""

from __future__ import annotations

import time
from typing import Any

from toolkit.launcher.failures import RankHung, end_of_log, hung_error
from toolkit.launcher.processes import lives
from toolkit.run_folder.folder import Folder
from toolkit.run_folder.heartbeat import BEAT_SECONDS, IN_A_STEP, Heartbeat, read_beats

BEGIN_SECONDS = 300.0
"""Time limit for a rank's first heartbeat: a busy machine takes over a minute to start the interpreter and the launcher."""

IDLE = 0.2
"""Share of a processor below which a rank that does not move is not computing."""

STILL_SECONDS = 5.0
"""After the timeout: first the process group's own has a chance, which leaves the other ranks' tracebacks in their logs."""


class HeartbeatMonitor:
    """Reads the heartbeats of one attempt about once a second."""

    def __init__(self, folder: Folder, ranks: int, timeout: float) -> None:
        """Start to monitor `ranks` ranks. `timeout`: seconds without a heartbeat after which a rank has hung."""
        self.folder, self.timeout = folder, timeout
        self.beats: dict[int, Heartbeat] = {}
        self._silent = dict.fromkeys(range(ranks), 0.0)
        self._still = 0.0
        self._cpu: dict[int, float] = {}
        self._looked = time.monotonic()

    def look(self) -> None:
        """Read new heartbeats.

        Raises:
            RankHung: for a rank that has been silent longer than the timeout, and for one that the others wait for.
        """
        # Time in which this process was suspended does not count as silence.
        passed = min(time.monotonic() - self._looked, 3 * BEAT_SECONDS)
        if passed < BEAT_SECONDS:
            return
        self._looked = time.monotonic()
        new, old = read_beats(self.folder.logs), self.beats
        fresh = {rank for rank, beat in new.items() if rank not in old or beat.time != old[rank].time}
        moved = any(rank not in old or beat.marks != old[rank].marks for rank, beat in new.items())
        self._silent = {rank: 0.0 if rank in fresh else silent + passed for rank, silent in self._silent.items()}
        self.beats = old | new
        self._still = 0.0 if moved else self._still + passed
        if moved:
            self._cpu = {rank: beat.cpu for rank, beat in self.beats.items()}
        self._find_silent()
        self._find_awaited()

    def seen(self) -> dict[str, Any]:
        """Return what `failure` asks about heartbeats."""
        return {"beats": self.beats, "behind": self.behind(), "timeout": self.timeout}

    def lost(self) -> bool:
        """Return whether a rank has ended early."""
        import psutil

        return any(beat.phase != "ended" and not psutil.pid_exists(beat.pid) for beat in self.beats.values())

    def behind(self) -> Heartbeat | None:
        """Return the rank with the least progress, if ranks of its stage differ."""
        stages: dict[int | None, list[Heartbeat]] = {}
        for beat in sorted(self.beats.values(), key=lambda beat: (beat.step, beat.marks)):
            stages.setdefault(beat.stage, []).append(beat)
        late = [
            ranks[0]
            for ranks in stages.values()
            if (ranks[0].step, ranks[0].marks) != (ranks[-1].step, ranks[-1].marks)
        ]
        return min(late, key=lambda beat: beat.step, default=None)

    def listens(self) -> bool:
        """Return whether all ranks handle stop signals."""
        self.beats |= read_beats(self.folder.logs)
        return len(self.beats) == len(self._silent) and all(beat.listens for beat in self.beats.values())

    def busy(self) -> bool:
        """Return whether a rank publishes a checkpoint. A stop waits for it."""
        return any(beat.phase == "save" for beat in self.beats.values())

    def _find_silent(self) -> None:
        for rank, silent in self._silent.items():
            beat = self.beats.get(rank)
            limit = self.timeout if beat else max(self.timeout, BEGIN_SECONDS)
            if silent > limit and (beat is None or lives(beat.pid, self.folder.token)):
                where = f"; at the last one it was {beat.where}" if beat else ", and none before"
                name = beat.name if beat else f"rank {rank}"
                raise RankHung(
                    f"{name} hung: no heartbeat for {silent:.1f} s, longer than {limit:g} s (--timeout){where}. "
                    f"{end_of_log(self.folder, rank)}"
                )

    def _find_awaited(self) -> None:
        """Find the rank that others wait for in a step: DeepSpeed's shared memory has no timeout of its own."""
        if self._still <= self.timeout + STILL_SECONDS:
            return
        beat = self.behind()
        outside = [beat_ for beat_ in self.beats.values() if beat_.phase not in IN_A_STEP]
        if outside in ([], [beat]) and (newest := beat or self._idle_rank()):
            raise hung_error(self.folder, newest, self.timeout)

    def _idle_rank(self) -> Heartbeat | None:
        """Return the rank that computes nothing among ranks with equal progress; None where all compute."""
        used = {rank: beat.cpu - self._cpu.get(rank, 0.0) for rank, beat in self.beats.items()}
        if len(used) < 2:
            return None
        least = min(used, key=lambda rank: used[rank])
        return self.beats[least] if used[least] < IDLE * self._still else None
