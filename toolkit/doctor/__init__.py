"""What this machine can do: `examine()` → `Diagnosis`; and what it is: `here()` → `Place`."""

from toolkit.doctor.abilities import Ability
from toolkit.doctor.examining import Diagnosis, examine
from toolkit.doctor.finding import Finding
from toolkit.doctor.place import Place, here

__all__ = ["Ability", "Diagnosis", "Finding", "Place", "examine", "here"]
