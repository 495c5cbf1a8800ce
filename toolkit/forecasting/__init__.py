"""What a run will take, before it is launched: `forecast()` → `Forecast`, `plan()` → `Plan`.

The way of a byte: `shallow` cuts the model down to three layers of each kind, `tracing` runs one step of it without memory
and notes what every operator allocates, `traces` keeps that on disk, `timeline` spreads it over the whole depth. An engine's
`simulate_step` enters it into a ledger, with how parameters, gradients, buffers and the optimizer move. `memory` calls it,
`timing` computes how long a step takes, and `predicting` makes the result; `planning` makes one for every strategy.
A new engine is a new file in `toolkit/engines`, a new GPU a row in `cards.py`.
"""

from toolkit.forecasting.plans import Candidate, Plan, plan
from toolkit.forecasting.prediction import forecast, forecast_job
from toolkit.forecasting.result import Forecast

__all__ = ["Candidate", "Forecast", "Plan", "forecast", "forecast_job", "plan"]
