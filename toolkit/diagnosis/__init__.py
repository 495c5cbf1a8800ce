"""Support of this machine: `diagnose()` → `Diagnosis`. Software and hardware: `environment()` → `Environment`."""

from toolkit.diagnosis.checks import diagnose
from toolkit.diagnosis.result import Ability, Diagnosis, Environment, Finding, environment

__all__ = ["Ability", "Diagnosis", "Environment", "Finding", "diagnose", "environment"]
