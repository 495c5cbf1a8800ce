"""What this machine can do: `examine()` → `Diagnosis`."""

from toolkit.doctor.abilities import Ability
from toolkit.doctor.examining import Diagnosis, examine
from toolkit.doctor.finding import Finding

__all__ = ["Ability", "Diagnosis", "Finding", "examine"]
