"""Support of this machine: `diagnose()` → `Diagnosis`. Software and hardware: `environment()` → `Environment`."""

from toolkit.diagnosis.checks import Diagnosis, diagnose
from toolkit.diagnosis.host import Environment, environment
from toolkit.diagnosis.result import Finding
from toolkit.diagnosis.support import Ability

__all__ = ["Ability", "Diagnosis", "Environment", "Finding", "diagnose", "environment"]
