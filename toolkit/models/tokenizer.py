"""A model's tokenizer, with a pad token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.core.errors import ModelError
from toolkit.models.resolution import check_tokenizer_code
from toolkit.models.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(spec: ModelSpec) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer with a pad token: its own, an unused special token, or the end-of-text token.

    Raises:
        ModelError: for a missing tokenizer, more tokens than embeddings, and no token to pad with.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            spec.source, trust_remote_code=spec.runs_code
        )
    except (OSError, ValueError, KeyError, AttributeError, ImportError) as error:
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
