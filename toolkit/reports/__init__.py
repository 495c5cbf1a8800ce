"""`report()`: a run's folder → one page that shows what was asked, what was got, and how the forecast held."""

from toolkit.reports.html_report import Report, report, reported
from toolkit.reports.record import ended, memory_of, throughput

__all__ = ["Report", "ended", "memory_of", "report", "reported", "throughput"]
