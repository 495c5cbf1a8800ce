"""Start, supervise, show, stop and restart runs of `accelerate launch`, and explain their failures."""

from toolkit.launcher.api import attach, launch, resume, runs
from toolkit.launcher.restarts import RestartPolicy, supervise_with_restarts
from toolkit.launcher.run_handle import Run
from toolkit.launcher.supervisor import Stopped, supervise

__all__ = [
    "RestartPolicy",
    "Run",
    "Stopped",
    "attach",
    "launch",
    "resume",
    "runs",
    "supervise",
    "supervise_with_restarts",
]
