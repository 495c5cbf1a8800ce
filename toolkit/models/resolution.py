"""From a name (embedded, a Hub id, a folder, a file) to a validated transformers config."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.run_config import EMBEDDED, check_model_name
from toolkit.core.atomic_io import LONGEST_JSON, check_fields, expand_user, read_json, read_limited, shorten_value
from toolkit.core.errors import ModelError, nearest, value_or
from toolkit.models.files import first_line, hub_file, local_folder
from toolkit.models.remote_code import check_code, check_kernels, named_code
from toolkit.models.spec import ModelSpec
from toolkit.models.structure import class_with_text

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def embedded_config() -> dict[str, Any]:
    """Return the config of the embedded model: a Llama of 5,048,576 parameters, 19.3 MiB in fp32, nothing tied."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def embedded_checkpoint(folder: Path) -> None:
    """Write the embedded model into a new folder: config.json and model.safetensors, fp32, drawn from seed 0.

    It runs before any engine is set up, since ZeRO-3 changes the drawn weights.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations import is_deepspeed_zero3_enabled

    assert not is_deepspeed_zero3_enabled(), "the embedded model is made before ZeRO-3 is set up"
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig.from_dict(embedded_config()))
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


MOST_LAYERS = 2_000
"""Layers of the deepest model that is built."""


def locate(name: str, trust: str | None = None) -> tuple[str | None, Path | None, bool]:
    """Return the place of a model's weights, its config.json, and whether both are the Hub's; no path for the embedded model.

    Raises:
        ModelError: for an unknown name, and for trust in code of the embedded model.
    """
    if name == EMBEDDED:
        if trust is not None:
            raise ModelError("the embedded model has no own code to trust: leave --trust-remote-code out.")
        return None, None, False
    path = expand_user(name)
    if path.is_dir():
        weights = (path / "model.safetensors.index.json", path / "model.safetensors")
        return str(path) if any(file.is_file() for file in weights) else None, path / "config.json", False
    check_model_name(name)
    if path.is_file():
        return None, path, False
    if name.endswith(".json") or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ModelError(
            f"model {name!r}: there is no such folder or file. "
            "Give a folder with a config.json, or a Hub id such as Qwen/Qwen3-8B."
        )
    # A snapshot of one commit is treated as a folder.
    path = hub_file(name, trust)
    return name if trust is None else str(path.parent), path, True


def config_text(path: Path | None) -> bytes | None:
    """Return a config's text for the cache of specs; None for configs with own code or a kernel, which are always checked."""
    if path is None:
        return json.dumps(embedded_config()).encode()
    text = value_or(b'"auto_map"', read_limited, path, LONGEST_JSON)
    return None if b'"auto_map"' in text or b"attn_implementation" in text else text


def read_config(name: str, path: Path | None, trust: str | None = None, *, hub: bool = False) -> PretrainedConfig:
    """Read a config object from a file. With `trust`, the model's own class may read it."""
    from transformers import AutoConfig, LlamaConfig

    if path is None:
        return LlamaConfig.from_dict(embedded_config())
    if not path.is_file():
        fix = "Give a folder that was saved with save_pretrained, or a Hub id."
        if (path.parent / "adapter_config.json").is_file():
            fix = _adapter_fix(path.parent)
        raise ModelError(f"model {name!r} has no {path.name}. {fix}")
    try:
        values = read_json(path, finite=False)
        check_fields(values, {})
    except ValueError as error:
        problem = f"{path.name} is not valid JSON ({error})"
        raise ModelError(f"model {name!r}: {problem}. Copy it again from the model's source.") from None
    check_kernels(name, values)
    check_depth(name, values)
    own = bool(values.get("auto_map"))
    check_code(name, path.parent, trust, needed=own and not is_native(values), hub=hub)
    if trust is None or not own:
        check_known(name, values)
    try:
        # With a file, transformers does not query the Hub. The model's own classes need the folder.
        where = path if trust is None else path.parent
        config: PretrainedConfig = AutoConfig.from_pretrained(
            str(where), trust_remote_code=trust is not None, local_files_only=True
        )
    except Exception as error:  # each config class checks its values with its own exceptions
        raise ModelError(f"model {name!r}: transformers refuses its {path.name}: {first_line(error)}") from error
    return config


def _adapter_fix(folder: Path) -> str:
    """Return how to go on from an adapter's folder."""
    base = value_or("", lambda: str(read_json(folder / "adapter_config.json")["base_model_name_or_path"]))
    gone = bool(base) and local_folder(base) is None
    moved = f" {base!r} is not on this machine: give its present place in adapter_config.json." if gone else ""
    return (
        f"It is an adapter{f' over {base!r}' if base else ''}, and training starts from whole weights. Merge it: "
        "`toolkit export RUN --merge -o FOLDER`, or of other tools "
        f"`peft.AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained(FOLDER)` with the "
        f"base's tokenizer.{moved} Then give FOLDER, and train a new adapter over it."
    )


def check_depth(name: str, values: Mapping[str, Any]) -> None:
    """Refuse a config with more layers than any model has: building them would fill the memory even without weights.

    Raises:
        ModelError: naming the field.
    """
    for key, value in values.items():
        if isinstance(value, dict):
            check_depth(name, value)
        elif re.search(r"layers?$|blocks?$|depth", str(key)) and isinstance(value, int) and value > MOST_LAYERS:
            raise ModelError(
                f"model {name!r}: its config has {key} {shorten_value(value)}, expected at most {MOST_LAYERS:,}."
            )


def check_tokenizer_code(spec: ModelSpec) -> None:
    """Refuse a tokenizer that needs untrusted code.

    Raises:
        ModelError: naming the files and the flag.
    """
    source = spec.source or spec.name
    folder = local_folder(source)
    if not spec.runs_code and folder is not None and named_code(folder / "tokenizer_config.json"):
        check_code(spec.name, folder, None, needed=True, hub=not expand_user(source).is_dir())


def is_native(values: Mapping[str, Any]) -> bool:
    """Return whether transformers has the architecture of a config."""
    import transformers

    architecture = _architecture(values)
    supported = architecture is None or hasattr(transformers, architecture)
    kind = values.get("model_type")
    return isinstance(kind, str) and kind in transformers.CONFIG_MAPPING and supported


def _architecture(values: Mapping[str, Any]) -> str | None:
    listed = values.get("architectures")
    return str(listed[0]) if isinstance(listed, list) and listed else None


def check_known(name: str, values: Mapping[str, Any]) -> None:
    """Refuse an architecture that transformers does not have. `values` may be a raw config.json."""
    import transformers

    kind, trainable = values.get("model_type"), _trainable()
    if not kind or not isinstance(kind, str):
        raise ModelError(f"model {name!r}: its config names no model_type. Expected one such as 'llama' or 't5'.")
    if is_native(values):
        return
    if values.get("auto_map"):
        raise ModelError(
            f"model {name!r} needs its own code ({json.dumps(values['auto_map'])}). Give its folder or "
            "Hub id, and --trust-remote-code REVISION."
        )
    what, word, known_words = "model_type", kind, list(trainable)
    if kind in transformers.CONFIG_MAPPING:
        classes = [[value] if isinstance(value, str) else value for value in trainable.values()]
        what, word = "architecture", str(_architecture(values))
        known_words = [architecture for listed in classes for architecture in listed]
    raise ModelError(
        f"model {name!r}: {what} {word!r} is unknown to transformers {transformers.__version__}.{nearest(word, known_words)} "
        "A newer one may know it: `pip install --upgrade transformers`."
    )


def check_generates(name: str, values: Mapping[str, Any]) -> None:
    """Refuse models that do not generate text. `values`: a config with its defaults."""
    from transformers.models.auto import modeling_auto as auto

    kind, architecture = str(values.get("model_type")), _architecture(values)
    seq2seq = values.get("is_encoder_decoder")
    masked = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES or kind == "bert-generation"
    encoder = masked and not (seq2seq or values.get("is_decoder") or values.get("causal"))
    encoder = encoder or str(architecture).endswith("EncoderModel")
    writes = kind in (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if seq2seq else _trainable())
    if encoder or not (writes or class_with_text(values)):
        what = "an encoder" if encoder else "no model that reads and writes text"
        raise ModelError(
            f"model {name!r} ({architecture or kind}) is {what}: expected a causal model such as Llama, "
            "or a sequence-to-sequence model such as T5."
        )


def _trainable() -> Mapping[str, str | tuple[str, ...]]:
    """Return model_type → class of every causal and sequence-to-sequence language model in transformers."""
    from transformers.models.auto import modeling_auto as auto

    return {**auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
