"""Helpers for from_pretrained: auto class, names in the files, no engine hooks, and the tokenizer."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.core.atomic_io import LONGEST_JSON, expand_user, read_limited
from toolkit.core.errors import ModelError
from toolkit.models import class_with_text, require_weights
from toolkit.models.resolution import check_tokenizer_code
from toolkit.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHOWS_PROGRESS = 500_000_000
"""Number of weights from which reading shows its progress."""


TOKENIZERS = {
    "deepseek_v3": "", "gemma": "GemmaTokenizer", "gemma2": "GemmaTokenizer", "gemma3_text": "GemmaTokenizer",
    "gpt2": "GPT2Tokenizer", "gpt_neox": "GPTNeoXTokenizer", "gpt_oss": "", "llama": "", "mistral": "TokenizersBackend",
    "mixtral": "TokenizersBackend", "olmo2": "TokenizersBackend", "phi3": "TokenizersBackend", "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer", "qwen3_moe": "Qwen2Tokenizer", "smollm3": "",
}  # fmt: skip
"""Model type → the tokenizer that AutoTokenizer registers for it, if any. AutoTokenizer itself imports torch."""


def auto_class(spec: ModelSpec) -> Any:
    """Return the transformers class that reads this kind of model."""
    import transformers

    if spec.kind == "seq2seq":
        return transformers.AutoModelForSeq2SeqLM
    if not spec.runs_code and class_with_text(spec.config) == spec.architecture:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def read_pretrained(spec: ModelSpec, folder: str | Path | None, **options: Any) -> Any:
    """Read a model's weights from safetensors, whole, on this rank alone; `options` go to `from_pretrained`."""
    with without_engine():
        return auto_class(spec).from_pretrained(
            folder, trust_remote_code=spec.runs_code, use_safetensors=True, **options
        )


def open_tensors(spec: ModelSpec) -> dict[str, Any]:
    """Return the open file of each tensor in a model's files, by the tensor's name."""
    from safetensors import safe_open

    files: dict[str, Any] = {}
    for path in require_weights(spec):
        file: Any = safe_open(path, framework="pt")
        files.update(dict.fromkeys(file.keys(), file))
    return files


def fp32_tensors(spec: ModelSpec) -> list[str]:
    """Return the names of the tensors that a model's files hold in fp32 or wider."""
    return [name for name, file in open_tensors(spec).items() if file.get_slice(name).get_dtype() in ("F32", "F64")]


def check_tied(spec: ModelSpec) -> None:
    """Check that the files hold one value for weights that the config ties.

    Raises:
        ModelError: where they differ. transformers would untie them on some ranks, and drop one on others.
    """
    import torch

    files = open_tensors(spec) if spec.tied else {}
    for group in spec.tied:
        names = [name for full in group for name in (full, full.partition(".")[2]) if name in files]
        for one, other in itertools.pairwise(names):
            first, second = (files[name].get_tensor(name) for name in (one, other))
            if first.dtype != second.dtype:
                first, second = first.float(), second.float()
            if not torch.equal(first, second):
                raise ModelError(
                    f"model {spec.name!r}: its config ties {one} and {other}, but its files hold different values for them. "
                    "If both are meant, set tie_word_embeddings to false in config.json. Otherwise delete one of the tensors."
                )


def set_tensor(model: Any, name: str, tensor: Any) -> None:
    """Replace a parameter or buffer by its full name."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, tensor)


def first_names(model: torch.nn.Module, *, buffers: bool = True) -> dict[str, str]:
    """Return every name of a parameter or buffer → the first name of the same tensor. Engines know it by that one."""
    others = model.named_buffers(remove_duplicate=False) if buffers else ()
    first: dict[int, str] = {}
    named = itertools.chain(model.named_parameters(remove_duplicate=False), others)
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def config_ties(model: Any) -> dict[str, str]:
    """Return the names that a model's config ties → the name of the tensor that each takes."""
    find = getattr(model, "get_expanded_tied_weights_keys", None)
    return find(all_submodels=True) if find else {}


def freeze(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Freeze the parameters that get no gradients: outside of the text part, and those that the class does not train."""
    for name, parameter in model.named_parameters():
        if not spec.trains(name):
            parameter.requires_grad_(False)


def kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return the test of a name for the weights that transformers keeps in fp32 where the others have this dtype."""
    from transformers.core_model_loading import build_glob_alternation

    plan = list(model._get_dtype_plan(dtype))
    names = build_glob_alternation(plan)[0] if plan else None
    return lambda name: names is not None and names.search(name) is not None


def disk_tensors(model: PreTrainedModel, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return tensors with the names and shapes that transformers gives them in files (one expert a tensor, say).

    Raises:
        ValueError: if a conversion joins these with a missing tensor.
    """
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Any] = revert_weight_conversion(model, tensors)
    return reverted


def disk_layouts(model: PreTrainedModel, name: str, shape: tuple[int, ...]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield how files may hold a parameter of this shape: names and shapes of tensors that lie row below row in it.

    Under its own name; as transformers writes it (other names, one expert a tensor); and without the name of the base model.
    """
    import torch

    yield {name: shape}
    # Numbered rows show where a conversion takes them. It may refuse these, as it expects whole weights.
    rows, columns = (shape, ()) if len(shape) < 2 else (shape[:-1], shape[-1:])
    numbers = torch.arange(math.prod(rows))
    with contextlib.suppress(ValueError, RuntimeError, IndexError):
        parts = disk_tensors(model, {name: numbers.view(*rows, *(1 for _ in columns))})
        in_order = sorted(parts.items(), key=lambda item: int(item[1].flatten()[0]))
        if torch.equal(torch.cat([part.flatten() for _, part in in_order]), numbers):
            yield {source: (*part.shape[: part.dim() - len(columns)], *columns) for source, part in in_order}
    yield {name.removeprefix(f"{model.base_model_prefix}."): shape}


@contextmanager
def without_engine() -> Iterator[None]:
    """Read whole models on this rank: transformers would partition under ZeRO-3, and read on one rank only under FSDP."""
    from transformers.integrations import deepspeed

    active, fsdp = deepspeed._hf_deepspeed_config_weak_ref, os.environ.pop("ACCELERATE_USE_FSDP", None)
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = active
        if fsdp is not None:
            os.environ["ACCELERATE_USE_FSDP"] = fsdp


@contextmanager
def quiet_bars(*, shown: bool) -> Iterator[None]:
    """Silence warnings about missing weights, which raise errors here. `shown`: whether bars are shown."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    if not shown:
        logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def load_tokenizer(spec: ModelSpec) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer with a pad token: its own, an unused special token, or the end-of-text token.

    Raises:
        ModelError: for a missing tokenizer, more tokens than embeddings, and no token to pad with.
    """
    try:
        tokenizer = _read_tokenizer(spec)
    except (OSError, ValueError, KeyError, AttributeError, ImportError, RecursionError) as error:
        check_tokenizer_code(spec)
        raise ModelError(
            f"model {spec.name!r}: its tokenizer cannot be read ({error}). "
            "Copy tokenizer.json and tokenizer_config.json into the folder of its weights."
        ) from error
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= spec.vocab:
        raise ModelError(
            f"model {spec.name!r}: its tokenizer goes to token {largest:,}, its embedding only to {spec.vocab - 1:,}. "
            "Give the tokenizer that belongs to the model."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = _pad_token(spec, tokenizer)
    return tokenizer


def _read_tokenizer(spec: ModelSpec) -> PreTrainedTokenizerBase:
    """Read it as AutoTokenizer does; of well-known models by the class that it would choose, without torch."""
    import transformers

    source = spec.source or (spec.name if expand_user(spec.name).is_dir() else None)
    if source is None:
        raise ModelError(
            f"model {spec.name!r} is a config without a tokenizer. Give a folder that holds one, or a Hub id."
        )
    folder, kind = expand_user(source), spec.config.get("model_type")
    about, tokens = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if kind in TOKENIZERS and tokens.is_file() and about.is_file():
        fields, registered = json.loads(read_limited(about, LONGEST_JSON)), TOKENIZERS[kind]
        declared = str(fields.get("tokenizer_class")).removesuffix("Fast")
        generic = declared in ("TokenizersBackend", "PreTrainedTokenizer") and kind != "qwen2"
        # A file with bytes is read by the generic class, whatever it declares.
        llama = not registered and declared == "LlamaTokenizer" and b"ByteLevel" not in tokens.read_bytes()
        if "auto_map" not in fields and (
            generic or llama or declared == registered != "" or registered == "TokenizersBackend"
        ):
            name = "TokenizersBackend" if generic or registered == "TokenizersBackend" else declared
            return getattr(transformers, name).from_pretrained(source)
    return transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=spec.runs_code)


def _pad_token(spec: ModelSpec, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the config's pad token, else a special token for padding or in reserve, else the end-of-text token."""
    configured = spec.config.get("pad_token_id")
    if isinstance(configured, int) and configured >= 0 and (token := tokenizer.convert_ids_to_tokens(configured)):
        return str(token)
    special = [str(token) for _, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    spare = [token for word in ("pad", "reserved", "unused") for token in special if word in token.lower()]
    if spare:
        return spare[0]
    if tokenizer.eos_token is None:
        raise ModelError(
            f"model {spec.name!r}: its tokenizer has no pad token, none in reserve, and none that ends a text. "
            "Set pad_token in its tokenizer_config.json."
        )
    return str(tokenizer.eos_token)
