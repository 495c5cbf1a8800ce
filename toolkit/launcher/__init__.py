"""Start, supervise, show, stop and restart runs of `accelerate launch`, and explain their failures."""

from toolkit.launcher.api import attach, launch, resume, runs
from toolkit.launcher.restarts import RestartPolicy, supervise_with_restarts
from toolkit.launcher.run_handle import Run
from toolkit.launcher.run_overlay import compare_runs
from toolkit.launcher.supervisor import Stopped, supervise

__all__ = [
    "RestartPolicy",
    "Run",
    "Stopped",
    "attach",
    "compare_runs",
    "launch",
    "resume",
    "runs",
    "supervise",
    "supervise_with_restarts",
]
