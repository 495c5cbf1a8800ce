"""A source, a tokenizer and settings → rows in the cache, made once and found again by their fingerprint."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from toolkit.core.cache import cache_folder
from toolkit.core.errors import DataError, StrategyError
from toolkit.data.encoder import Encoder, read_template
from toolkit.data.ingestion import Contents, cache_errors, ingest
from toolkit.data.packing import Counts, pack_rows, supports_packing
from toolkit.data.rows import Rows, find_rows, open_rows, write_rows
from toolkit.data.tokenization import tokenize
from toolkit.models import ModelSpec

FORMAT = 1
"""Of the cached rows. Whoever changes what rows hold raises it, so that older ones are not taken for new ones."""


def prepare_data(
    source: str | Path | Contents | None,
    tokenizer: Any,
    spec: ModelSpec,
    *,
    seq_len: int,
    mask_prompts: bool = True,
    chat_template: str | Path | None = None,
    packing: bool | None = None,
    text_column: str = "text",
) -> Rows:
    """Tokenize a source once, into `$XDG_CACHE_HOME/accelerate-toolkit/data`, and open what is there.

    Unchanged files are not read again. Ranks that come at once wait for the first.

    Args:
        source: as `sources.find_source` says, or what `ingest` returned; None is the embedded text.
        tokenizer: a loaded transformers tokenizer.
        mask_prompts: train on completions and the assistant's turns only. A text has no prompts.
        chat_template: a file with a Jinja template, or its text, in place of the tokenizer's own.
        packing: None packs where `supports_packing(spec)`; True where it does not is refused.
        text_column: the column of JSONL and dataset rows that holds a text.

    Raises:
        DataError: for anything in source, tokenizer or template that cannot be trained on; names file and line.
        StrategyError: for a `seq_len` over the model's limit.
    """
    packed = _check(tokenizer, spec, seq_len, packing)
    eos = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos
    template = read_template(chat_template)
    contents = source if isinstance(source, Contents) else ingest(source, text_column=text_column)
    about = {"seq_len": seq_len, "packed": packed, "kind": spec.kind, "pad_token_id": pad}
    settings = {
        **about, "format": FORMAT, "eos": eos, "mask_prompts": mask_prompts, "template": template, "text_column":
        text_column,
    }  # fmt: skip
    fingerprint = _fingerprint(contents, tokenizer, settings)
    if (rows := find_rows(fingerprint)) is None:
        folder = cache_folder("data") / fingerprint
        seq2seq = spec.kind == "seq2seq"
        encoder = Encoder(tokenizer=tokenizer, eos=eos, mask_prompts=mask_prompts, template=template, seq2seq=seq2seq)
        _build(folder, contents, encoder, {**about, "fingerprint": fingerprint})
        rows = open_rows(folder)
    return rows


def _check(tokenizer: Any, spec: ModelSpec, seq_len: int, packing: bool | None) -> bool:
    """Refuse settings that this model cannot take. Return whether its rows are packed."""
    if spec.max_positions is not None and seq_len > spec.max_positions:
        raise StrategyError(
            f"seq_len {seq_len}: {spec.name} has positions for {spec.max_positions} tokens. Use --seq-len"
            f" {spec.max_positions} or less."
        )
    largest = max(tokenizer.get_vocab().values())
    if largest >= spec.vocab:
        raise DataError(
            f"the tokenizer has token ids up to {largest}, a vocabulary larger than the embedding of {spec.name},"
            f" which has {spec.vocab} rows. Use the model's own tokenizer, or enlarge the model and save it:"
            " model.resize_token_embeddings(len(tokenizer))."
        )
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer of {spec.name} has no end-of-sequence token. Set one with"
            " tokenizer.eos_token = '…' and save it."
        )
    can = packing is not False and supports_packing(spec)
    if packing and not can:
        raise DataError(
            f"packing: {spec.architecture} does not keep packed documents apart. Leave packing open, and they are"
            " padded."
        )
    return can


def _fingerprint(contents: Contents, tokenizer: Any, settings: dict[str, Any]) -> str:
    """Return a sha256 over the hashes of the source's contents, the tokenizer and the settings, without file names."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(json.dumps(_tokenizer_state(tokenizer), sort_keys=True).encode())
    for each in contents.hashes:
        digest.update(f"\n{each}".encode())
    return digest.hexdigest()


def _tokenizer_state(tokenizer: Any) -> dict[str, Any]:
    """Return everything that decides how the tokenizer encodes a text."""
    state: dict[str, Any] = {
        "class": type(tokenizer).__name__,
        "special": tokenizer.special_tokens_map,
        "template": tokenizer.chat_template,
    }
    if not tokenizer.is_fast:
        settings = str(sorted(tokenizer.init_kwargs.items(), key=str))
        return {**state, "vocabulary": tokenizer.get_vocab(), "settings": settings}
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # These two say how the last call was made, not what the tokenizer is.
    return {
        **state,
        "backend": {name: value for name, value in backend.items() if name not in ("truncation", "padding")},
    }


def _build(folder: Path, contents: Contents, encoder: Encoder, about: dict[str, Any]) -> None:
    from filelock import FileLock

    counts = Counts()
    with cache_errors(folder.parent), FileLock(folder.with_suffix(".lock")):
        if folder.exists():
            return
        shape = {"kind": about["kind"], "packed": about["packed"], "seq_len": about["seq_len"]}
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tokens-") as fresh:
            encoded = tokenize(contents, encoder, Path(fresh))
            write_rows(folder, pack_rows(encoded, counts, **shape, pad=about["pad_token_id"]), counts, about)
