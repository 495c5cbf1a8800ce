"""Describe a model without reading weights: `describe()` → `ModelSpec`; and find its files."""

from toolkit.models.description import describe as describe
from toolkit.models.files import copy_code as copy_code
from toolkit.models.files import copy_processor as copy_processor
from toolkit.models.files import hub_reachable as hub_reachable
from toolkit.models.files import local_weights as local_weights
from toolkit.models.files import require_weights as require_weights
from toolkit.models.resolution import embedded_config as embedded_config
from toolkit.models.spec import NF4 as NF4
from toolkit.models.spec import ROLES as ROLES
from toolkit.models.spec import ModelSpec as ModelSpec
from toolkit.models.spec import MoE as MoE
from toolkit.models.spec import Parameter as Parameter
from toolkit.models.spec import generic_name as generic_name
from toolkit.models.structure import class_with_text as class_with_text
