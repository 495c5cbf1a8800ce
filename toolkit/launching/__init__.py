"""Runs by `accelerate launch`: shown while they go, watched, ended whole, their failures explained, and begun again."""

from toolkit.launching.detaching import launch, resume
from toolkit.launching.failing import RankDied, RankHung
from toolkit.launching.finding import Runs, attach, runs
from toolkit.launching.restarting import Care, persevere
from toolkit.launching.running import Run
from toolkit.launching.stopping import Stopped
from toolkit.launching.supervising import supervise

__all__ = [
    "Care",
    "RankDied",
    "RankHung",
    "Run",
    "Runs",
    "Stopped",
    "attach",
    "launch",
    "persevere",
    "resume",
    "runs",
    "supervise",
]
