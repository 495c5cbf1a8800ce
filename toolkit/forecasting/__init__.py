"""Forecast a run before its launch: `forecast()` → `Forecast`, `plan()` → `Plan`.

`traced_model` builds the model with three layers of each kind. `tracing` runs one step of it under FakeTensor and records each
allocation. `traces` caches that on disk and repeats it over the whole depth. An engine's `simulate_step` enters it into
a ledger, together with its parameters, gradients, buffers and optimizer states. `memory` calls the engine, `timing` computes the
step time, `prediction` builds the forecast, `plans` builds one for every strategy. A new GPU is a row in `gpu_catalog.py`.
"""

from toolkit.forecasting.plans import Plan, plan
from toolkit.forecasting.prediction import forecast, forecast_job, resolve
from toolkit.forecasting.result import Forecast
from toolkit.forecasting.search import Candidate

__all__ = ["Candidate", "Forecast", "Plan", "forecast", "forecast_job", "plan", "resolve"]
