"""What a model is, before a weight is read: `describe()` → `ModelSpec`; and where its weights are."""

from toolkit.model.describing import describe
from toolkit.model.finding import EMBEDDED, embedded_config
from toolkit.model.hub import hub_reachable
from toolkit.model.spec import ROLES, ModelSpec, MoE, Parameter
from toolkit.model.weights import checkpoint_dtype, local_weights, require_weights

__all__ = [
    "EMBEDDED",
    "ROLES",
    "MoE",
    "ModelSpec",
    "Parameter",
    "checkpoint_dtype",
    "describe",
    "embedded_config",
    "hub_reachable",
    "local_weights",
    "require_weights",
]
