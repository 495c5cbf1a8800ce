"""What this machine can do: `examine()` → `Diagnosis`; and what it is: `here()` → `Place`."""

from toolkit.diagnosis.environment import Place, here
from toolkit.diagnosis.report import Diagnosis, examine
from toolkit.diagnosis.result import Finding
from toolkit.diagnosis.support import Ability

__all__ = ["Ability", "Diagnosis", "Finding", "Place", "examine", "here"]
