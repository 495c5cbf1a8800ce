"""`report()`: a run's folder → one page that shows what was asked, what was got, and how the forecast held."""

from toolkit.reporting.record import ended, memory_of, throughput
from toolkit.reporting.reports import Report, report, reported

__all__ = ["Report", "ended", "memory_of", "report", "reported", "throughput"]
