"""One word switches how a model is trained: thin helpers around `accelerator.prepare`."""

import logging
import os
import sys

from toolkit.comparing import Comparison, compare
from toolkit.devices import Device, Hardware, hardware
from toolkit.doctor import Place, examine, here
from toolkit.engines.base import import_plugins
from toolkit.engines.job import Job
from toolkit.engines.records import Prepared, StateMemory
from toolkit.errors import (
    DataError,
    MissingLibrary,
    ModelError,
    NotFinite,
    RunError,
    StrategyError,
    StrategyMismatch,
    ToolkitError,
)
from toolkit.explaining import Contrast, Precisions, Timeline, contrast, precisions, timeline
from toolkit.exporting import Export, export, save, verify
from toolkit.following import log, stopping
from toolkit.forecasting import Forecast, Plan, forecast, plan
from toolkit.launching import Run, Runs, attach, launch, resume, runs
from toolkit.loading import load
from toolkit.model import ModelSpec, describe
from toolkit.notebook.exploring import Explorer, explore
from toolkit.phases import phase
from toolkit.preparing import Audit, audit, prepare, prepared
from toolkit.readying import Recipe
from toolkit.reporting import Report, report
from toolkit.runtime import accelerator, job
from toolkit.strategy import Loop, Strategy
from toolkit.training import Step, evaluate, train
from toolkit.trying import Trial, Trials, try_out

__all__ = [
    "Audit",
    "Comparison",
    "Contrast",
    "DataError",
    "Device",
    "Explorer",
    "Export",
    "Forecast",
    "Hardware",
    "Job",
    "Loop",
    "MissingLibrary",
    "ModelError",
    "ModelSpec",
    "NotFinite",
    "Place",
    "Plan",
    "Precisions",
    "Prepared",
    "Recipe",
    "Report",
    "Run",
    "RunError",
    "Runs",
    "StateMemory",
    "Step",
    "Strategy",
    "StrategyError",
    "StrategyMismatch",
    "Timeline",
    "ToolkitError",
    "Trial",
    "Trials",
    "accelerator",
    "attach",
    "audit",
    "compare",
    "contrast",
    "describe",
    "evaluate",
    "examine",
    "explore",
    "export",
    "forecast",
    "hardware",
    "here",
    "job",
    "launch",
    "load",
    "log",
    "phase",
    "plan",
    "precisions",
    "prepare",
    "prepared",
    "report",
    "resume",
    "runs",
    "save",
    "stopping",
    "timeline",
    "train",
    "try_out",
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
