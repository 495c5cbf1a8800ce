"""What a model is, before a weight is read: `describe()` → `ModelSpec`; and where its weights are."""

from toolkit.model.describing import describe
from toolkit.model.finding import EMBEDDED, check_tokenizer_code, embedded_config
from toolkit.model.hub import hub_reachable
from toolkit.model.spec import ROLES, ModelSpec, MoE, Parameter
from toolkit.model.text_part import class_with_text
from toolkit.model.weights import checkpoint_dtype, copy_code, copy_processor, local_weights, require_weights

__all__ = [
    "EMBEDDED",
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
