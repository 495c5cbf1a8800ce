"""`report()`: a run's folder → one page that shows what was asked, what was got, and how the forecast held."""

from toolkit.reporting.record import throughput
from toolkit.reporting.reports import Report, report, reported

__all__ = ["Report", "report", "reported", "throughput"]
