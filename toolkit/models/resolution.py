"""From a name (a Hub id, a folder, a file) to a transformers config, after looking for what can be wrong with it."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.run_config import EMBEDDED
from toolkit.core.atomic_io import LIMIT, expand_user, open_regular, read_json, shorten_value
from toolkit.core.errors import ModelError, nearest
from toolkit.models.embedded import embedded_config
from toolkit.models.hub import cached, first_line, hub_config, hub_snapshot
from toolkit.models.remote_code import check_code, check_kernels, named_code
from toolkit.models.spec import ModelSpec
from toolkit.models.text_part import class_with_text

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DEEPEST = 2_000
"""Layers of the deepest model that is built."""


def find(name: str, trust: str | None = None) -> tuple[str | None, PretrainedConfig]:
    """Resolve a name to the place of its weights and its config. `trust` as in `describe`."""
    if name == EMBEDDED:
        if trust is not None:
            raise ModelError("the embedded model has no own code to trust: leave --trust-remote-code out.")
        from transformers import LlamaConfig

        return None, LlamaConfig.from_dict(embedded_config())
    path = expand_user(name)
    if path.is_dir():
        return _folder_source(path), _read_config(name, path / "config.json", trust)
    if path.is_file():
        return None, _read_config(name, path, trust)
    if _is_path(name):
        raise ModelError(
            f"model {name!r}: there is no such folder or file. "
            "Give a folder with a config.json, or a Hub id such as Qwen/Qwen3-8B."
        )
    if trust is not None:
        # The files of that commit, and no others: a folder like any other from here on.
        pinned = hub_snapshot(name, trust)
        return str(pinned), _read_config(name, pinned / "config.json", trust, hub=True)
    return name, _read_config(name, hub_config(name), hub=True)


def config_text(name: str) -> tuple[str | None, bytes | None]:
    """Return the place of a model's weights, and its config's text: of the embedded model, a folder, a file or a Hub id.

    A config that names code of the model's own, or a kernel, is always looked at again.
    """
    if name == EMBEDDED:
        return None, json.dumps(embedded_config()).encode()
    path = expand_user(name)
    source: str | None = None
    if path.is_dir():
        source, path = _folder_source(path), path / "config.json"
    elif not path.is_file():
        if _is_path(name):
            return None, None
        source, path = name, hub_config(name)
    try:
        with open_regular(path) as file:
            text = file.read(min(LIMIT, os.fstat(file.fileno()).st_size))
    except OSError:
        return source, None
    return source, None if b'"auto_map"' in text or b"attn_implementation" in text else text


def _is_path(name: str) -> bool:
    """Return whether a name can be no Hub id."""
    return name.endswith(".json") or name.startswith(("/", ".", "~")) or name.count("/") > 1


def _folder_source(folder: Path) -> str | None:
    weights = (folder / "model.safetensors.index.json", folder / "model.safetensors")
    return str(folder) if any(path.is_file() for path in weights) else None


def _read_config(name: str, path: Path, trust: str | None = None, *, hub: bool = False) -> PretrainedConfig:
    """Read a config object from a file. With `trust`, the model's own class may read it."""
    if not path.is_file():
        adapter = (path.parent / "adapter_config.json").is_file()
        fix = (
            "It is an adapter: give the model that it was trained on."
            if adapter
            else ("Give a folder that was saved with save_pretrained, or a Hub id.")
        )
        raise ModelError(f"model {name!r} has no {path.name}. {fix}")
    try:
        values = read_json(path, finite=False)
    except ValueError as error:
        raise ModelError(
            f"model {name!r}: {path.name} is not valid JSON ({error}). Copy it again from where the model comes from."
        ) from None
    if not isinstance(values, dict):
        raise ModelError(
            f"model {name!r}: {path.name} holds a {type(values).__name__}, expected a JSON object with a model_type."
        )
    check_kernels(name, values)
    check_depth(name, values)
    own = bool(values.get("auto_map"))
    check_code(name, path.parent, trust, needed=own and not is_native(values), hub=hub)
    if trust is None or not own:
        check_known(name, values)
    from transformers import AutoConfig

    try:
        # A file, not a folder: the Hub is not asked. The model's own classes are found by the folder.
        where = path if trust is None else path.parent
        config: PretrainedConfig = AutoConfig.from_pretrained(
            str(where), trust_remote_code=trust is not None, local_files_only=True
        )
    except Exception as error:  # each config class checks its values with its own exceptions
        raise ModelError(f"model {name!r}: transformers refuses its {path.name}: {first_line(error)}") from error
    return config


def check_depth(name: str, values: Mapping[str, Any]) -> None:
    """Refuse a config of more layers than any model has: building them, even without weights, would take all memory.

    Raises:
        ModelError: naming the field.
    """
    for key, value in values.items():
        if isinstance(value, dict):
            check_depth(name, value)
        elif re.search(r"layers?$|blocks?$|depth", str(key)) and isinstance(value, int) and value > DEEPEST:
            raise ModelError(
                f"model {name!r}: its config has {key} {shorten_value(value)}, expected at most {DEEPEST:,}."
            )


def check_tokenizer_code(spec: ModelSpec) -> None:
    """Refuse a tokenizer that needs untrusted code.

    Raises:
        ModelError: naming the files and the flag.
    """
    source = spec.source or spec.name
    path = expand_user(source)
    folder = path if path.is_dir() else cached(source)
    if not spec.runs_code and folder is not None and named_code(folder / "tokenizer_config.json"):
        check_code(spec.name, folder, None, needed=True, hub=not path.is_dir())


def is_native(values: Mapping[str, Any]) -> bool:
    """Return whether transformers itself has the architecture that a config names."""
    import transformers
    from transformers import CONFIG_MAPPING

    architecture = _architecture(values)
    supported = architecture is None or hasattr(transformers, architecture)
    return isinstance(values.get("model_type"), str) and values["model_type"] in CONFIG_MAPPING and supported


def _architecture(values: Mapping[str, Any]) -> str | None:
    listed = values.get("architectures")
    return str(listed[0]) if isinstance(listed, list) and listed else None


def check_known(name: str, values: Mapping[str, Any]) -> None:
    """Refuse an architecture that transformers does not have itself. `values` may be a raw config.json."""
    import transformers
    from transformers import CONFIG_MAPPING

    kind, architecture = values.get("model_type"), _architecture(values)
    if not kind or not isinstance(kind, str):
        raise ModelError(f"model {name!r}: its config names no model_type. Expected one such as 'llama' or 't5'.")
    if is_native(values):
        return
    if values.get("auto_map"):
        raise ModelError(
            f"model {name!r} needs its own code ({json.dumps(values['auto_map'])}). Give its folder or "
            "Hub id, and --trust-remote-code REVISION."
        )
    version = f"transformers {transformers.__version__}"
    if kind not in CONFIG_MAPPING:
        raise ModelError(
            f"model {name!r}: model_type {kind!r} is unknown to {version}.{nearest(kind, _trainable())} "
            "A newer transformers may know it: `pip install --upgrade transformers`."
        )
    classes = {word: word for value in _trainable().values() for word in ([value] if isinstance(value, str) else value)}
    near = difflib.get_close_matches(str(architecture), classes, n=1)
    fix = f" Did you mean {near[0]!r}?" if near else ""
    raise ModelError(f"model {name!r}: architecture {architecture!r} is unknown to {version}.{fix}")


def check_generates(name: str, values: Mapping[str, Any]) -> None:
    """Refuse models that do not generate text. `values`: a config with its defaults."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    kind, listed = str(values.get("model_type")), values.get("architectures")
    architecture = str(listed[0]) if listed else kind
    decodes = values.get("is_encoder_decoder") or values.get("is_decoder") or values.get("causal")
    masked = (kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES or kind == "bert-generation") and not decodes
    encoder = masked or architecture.endswith("EncoderModel")
    speaks = kind in (
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if values.get("is_encoder_decoder") else _trainable()
    )
    if encoder or not (speaks or class_with_text(values)):
        what = "an encoder" if encoder else "no model that reads and writes text"
        raise ModelError(
            f"model {name!r} ({architecture}) is {what}: expected a causal model such as Llama, "
            "or a sequence-to-sequence model such as T5."
        )


def _trainable() -> Mapping[str, str | tuple[str, ...]]:
    """Return model_type → class of every causal and sequence-to-sequence language model in transformers."""
    from transformers.models.auto import modeling_auto as auto

    return {**auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
