"""What a run will take, before it is launched: `forecast()` → `Forecast`, `plan()` → `Plan`.

The way of a byte: `shallow` cuts the model down to three layers of each kind, `tracing` runs one step of it without memory
and notes what every operator allocates, `traces` keeps that on disk, `timeline` spreads it over the whole depth. `replays`
holds one file an engine: how parameters, gradients, buffers and the optimizer move meanwhile. `memory` lets both run into a
`ledger`, `timing` says how long they take, and `predicting` makes the result of it; `planning` asks that of every strategy.
A new engine is a new file in `replays`, a new GPU a row in `cards.py`.
"""

from toolkit.forecasting.forecasts import Forecast
from toolkit.forecasting.planning import Candidate, Plan, plan
from toolkit.forecasting.predicting import forecast, forecast_job

__all__ = ["Candidate", "Forecast", "Plan", "forecast", "forecast_job", "plan"]
