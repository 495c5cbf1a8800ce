"""`report()`: a run's folder → one page with the request, the audit, and the forecast compared with the measurement."""

from toolkit.reports.html_report import Report, report, reported
from toolkit.reports.tables import throughput

__all__ = ["Report", "report", "reported", "throughput"]
