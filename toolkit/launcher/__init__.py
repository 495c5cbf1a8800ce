"""Runs by `accelerate launch`: shown while they go, watched, ended whole, their failures explained, and begun again."""

from toolkit.launcher.api import launch, resume
from toolkit.launcher.failures import RankDied, RankHung
from toolkit.launcher.restarts import Care, persevere
from toolkit.launcher.run_handle import Run
from toolkit.launcher.run_list import Runs, attach, runs
from toolkit.launcher.stop_signals import Stopped
from toolkit.launcher.supervisor import supervise

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
