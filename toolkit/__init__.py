"""One word switches how a model is trained: thin helpers around `accelerator.prepare`."""

import logging
import os
import sys

from toolkit.comparison import Comparison, compare
from toolkit.config.run_config import RunConfig
from toolkit.config.strategy import Strategy
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import (
    DataError,
    MissingLibrary,
    ModelError,
    NotFinite,
    RunError,
    StrategyError,
    StrategyMismatch,
    ToolkitError,
)
from toolkit.core.phases import phase
from toolkit.devices.machine import Device, Hardware, hardware
from toolkit.diagnosis import Environment, diagnose, environment
from toolkit.engines.base import import_plugins
from toolkit.engines.job import Job
from toolkit.engines.records import Prepared, StateMemory
from toolkit.exporters import Export, export, save, verify
from toolkit.forecasting import Forecast, Plan, forecast, plan
from toolkit.forecasting.diffs import ForecastDiff, diff_forecasts
from toolkit.forecasting.dtype_reports import DtypeReport, dtype_report
from toolkit.forecasting.timelines import Timeline, timeline
from toolkit.launcher import Run, Runs, attach, launch, resume, runs
from toolkit.models import ModelSpec, describe
from toolkit.notebook.explorer import Explorer, explore
from toolkit.reports import Report, report
from toolkit.training.loading import load
from toolkit.training.loop import Step, evaluate, train
from toolkit.training.metrics import log, should_stop
from toolkit.training.preparation import Audit, audit, prepare, prepared
from toolkit.training.setup import accelerator, job
from toolkit.training.step_profile import StepProfile, StepProfiles, profile_steps

__all__ = [
    "Audit",
    "Comparison",
    "DataError",
    "Device",
    "DtypeReport",
    "Environment",
    "Explorer",
    "Export",
    "Forecast",
    "ForecastDiff",
    "Hardware",
    "Job",
    "MissingLibrary",
    "ModelError",
    "ModelSpec",
    "NotFinite",
    "Plan",
    "Prepared",
    "Report",
    "Run",
    "RunConfig",
    "RunError",
    "Runs",
    "StateMemory",
    "Step",
    "StepProfile",
    "StepProfiles",
    "Strategy",
    "StrategyError",
    "StrategyMismatch",
    "Timeline",
    "ToolkitError",
    "TrainConfig",
    "accelerator",
    "attach",
    "audit",
    "compare",
    "describe",
    "diagnose",
    "diff_forecasts",
    "dtype_report",
    "environment",
    "evaluate",
    "explore",
    "export",
    "forecast",
    "hardware",
    "job",
    "launch",
    "load",
    "log",
    "phase",
    "plan",
    "prepare",
    "prepared",
    "profile_steps",
    "report",
    "resume",
    "runs",
    "save",
    "should_stop",
    "timeline",
    "train",
    "verify",
]

# transformers would fetch compiled kernels from the Hub and run them, where the library `kernels` is installed.
os.environ.setdefault("USE_HUB_KERNELS", "0")
# On a CPU with AVX512-BF16 bitsandbytes complains that it could not fetch one (backends/cpu/ops.py:242).
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

import_plugins()

if "IPython" in sys.modules:
    from toolkit.notebook import register

    register()
