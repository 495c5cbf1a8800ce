"""Describe a model without reading weights: `describe()` → `ModelSpec`; and find its files."""

from toolkit.models.description import describe
from toolkit.models.embedded import embedded_config
from toolkit.models.hub import hub_reachable
from toolkit.models.resolution import check_tokenizer_code
from toolkit.models.spec import ROLES, ModelSpec, MoE, Parameter
from toolkit.models.text_part import class_with_text
from toolkit.models.weights import checkpoint_dtype, copy_code, copy_processor, local_weights, require_weights

__all__ = [
    "ROLES",
    "MoE",
    "ModelSpec",
    "Parameter",
    "check_tokenizer_code",
    "checkpoint_dtype",
    "class_with_text",
    "copy_code",
    "copy_processor",
    "describe",
    "embedded_config",
    "hub_reachable",
    "local_weights",
    "require_weights",
]
