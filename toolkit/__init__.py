"""One word switches how a model is trained: thin helpers around `accelerator.prepare`."""

import logging
import os
import sys

from toolkit.comparison import compare
from toolkit.config.hints import PYTHON_NAMES
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core import VERSION
from toolkit.core.errors import StrategyError, StrategyMismatch, ToolkitError
from toolkit.data_preview import preview
from toolkit.devices.machine import hardware
from toolkit.diagnosis import diagnose, environment
from toolkit.engines.losses import loss
from toolkit.engines.registry import import_plugins
from toolkit.exporters import export, generate, save, verify
from toolkit.forecasting import forecast, plan, resolve
from toolkit.forecasting.diffs import diff_forecasts
from toolkit.forecasting.dtype_reports import dtype_report
from toolkit.forecasting.timelines import timeline
from toolkit.launcher import attach, compare_runs, launch, resume, runs
from toolkit.models import describe
from toolkit.notebook.explorer import explore
from toolkit.notebook.variation import vary
from toolkit.reports import report
from toolkit.training.certificates import guard
from toolkit.training.loading import load
from toolkit.training.loop import train
from toolkit.training.metrics import evaluate, should_stop
from toolkit.training.own_step import forward_backward
from toolkit.training.plain_accelerate import AuditCallback, audit
from toolkit.training.preparation import prepare, prepared
from toolkit.training.rehearsal import rehearse
from toolkit.training.run_log import log
from toolkit.training.setup import accelerator, job
from toolkit.training.step_profile import profile_steps

__all__ = [
    "AuditCallback",
    "RunConfig",
    "Strategy",
    "StrategyError",
    "StrategyMismatch",
    "ToolkitError",
    "TrainConfig",
    "accelerator",
    "attach",
    "audit",
    "compare",
    "compare_runs",
    "describe",
    "diagnose",
    "diff_forecasts",
    "dtype_report",
    "environment",
    "evaluate",
    "explore",
    "export",
    "forecast",
    "forward_backward",
    "generate",
    "guard",
    "hardware",
    "job",
    "launch",
    "load",
    "log",
    "loss",
    "plan",
    "prepare",
    "prepared",
    "preview",
    "profile_steps",
    "rehearse",
    "report",
    "resolve",
    "resume",
    "runs",
    "save",
    "should_stop",
    "timeline",
    "train",
    "vary",
    "verify",
]

__version__ = VERSION


def __getattr__(name: str) -> object:
    """Say what to use in place of names of other libraries."""
    meant = f" {PYTHON_NAMES[name]}." if name in PYTHON_NAMES else ""
    raise AttributeError(f"module 'toolkit' has no attribute {name!r}.{meant}", name=name, obj=sys.modules[__name__])


# transformers would fetch compiled kernels from the Hub and run them, where the library `kernels` is installed.
os.environ.setdefault("USE_HUB_KERNELS", "0")
# On a CPU with AVX512-BF16 bitsandbytes complains that it could not fetch one (backends/cpu/ops.py:242).
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

import_plugins()

if "IPython" in sys.modules:
    from toolkit.notebook import register

    register()
