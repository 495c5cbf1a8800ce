"""A source, a tokenizer and settings → rows in the cache, made once and found again by their fingerprint."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from toolkit.config.tables import ATTENTIONS
from toolkit.core.cache import cache_folder
from toolkit.core.errors import DataError, StrategyError
from toolkit.data.encoder import Encoder, read_template
from toolkit.data.ingestion import Contents, cache_errors, ingest
from toolkit.data.packing import Columns, Counts, pack_rows
from toolkit.data.rows import META, Rows, column_names, find_rows
from toolkit.data.tokenization import tokenize
from toolkit.models import ModelSpec
from toolkit.models.varlen import separates_documents

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
    attention: str = "sdpa",
) -> Rows:
    """Tokenize a source once, into `$XDG_CACHE_HOME/accelerate-toolkit/data`, and open what is there.

    Unchanged files are not read again. Ranks that come at once wait for the first.

    Args:
        source: as `sources.find_source` says, or what `ingest` returned; None is the embedded text.
        tokenizer: as `models.hf_loading.load_tokenizer` returns it, with a token to pad with.
        mask_prompts: train on completions and the assistant's turns only. A text has no prompts.
        chat_template: a file with a Jinja template, or its text, in place of the tokenizer's own.
        packing: None packs where `supports_packing(spec, attention)`; True where it does not is refused.
        text_column: the column of JSONL and dataset rows that holds a text.
        attention: the kernel of the training.

    Raises:
        DataError: for anything in source, tokenizer or template that cannot be trained on; names file and line.
        StrategyError: for a `seq_len` over the model's limit.
    """
    from filelock import FileLock

    packed = _check(tokenizer, spec, seq_len, packing, attention)
    template = read_template(chat_template)
    contents = source if isinstance(source, Contents) else ingest(source, text_column=text_column)
    encoder = Encoder(
        tokenizer=tokenizer,
        eos=tokenizer.eos_token_id,
        mask_prompts=mask_prompts,
        template=template,
        seq2seq=spec.kind == "seq2seq",
    )
    about = {"seq_len": seq_len, "packed": packed, "kind": spec.kind, "pad_token_id": tokenizer.pad_token_id}
    settings = {**about, "format": FORMAT, "eos": encoder.eos, "mask_prompts": mask_prompts, "template": template}
    key = json.dumps([settings, _tokenizer_state(tokenizer), contents.hash], sort_keys=True)
    fingerprint = hashlib.sha256(key.encode()).hexdigest()
    folder = cache_folder("data") / fingerprint
    with cache_errors(folder.parent), FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".rows-") as work:
                encoded, counts = tokenize(contents, encoder), Counts()
                rows = pack_rows(
                    encoded, counts, kind=spec.kind, packed=packed, seq_len=seq_len, pad=about["pad_token_id"]
                )
                _write(Path(work, "rows"), rows, counts, {**about, "fingerprint": fingerprint})
                Path(work, "rows").rename(folder)
    result = find_rows(fingerprint)
    assert result is not None, "they were written under a lock"
    return result


def supports_packing(spec: ModelSpec, attention: str = "sdpa") -> bool:
    """Return whether the model keeps documents of a row apart, by its positions, under this attention kernel."""
    return separates_documents(spec, joined=ATTENTIONS[attention].joins_rows)


def _check(tokenizer: Any, spec: ModelSpec, seq_len: int, packing: bool | None, attention: str) -> bool:
    """Refuse settings that this model cannot take. Return whether its rows are packed."""
    if spec.max_positions is not None and seq_len > spec.max_positions:
        raise StrategyError(
            f"seq_len {seq_len}: {spec.name} has positions for {spec.max_positions} tokens. Use --seq-len"
            f" {spec.max_positions} or less."
        )
    if tokenizer.eos_token_id is None:
        fix = "Set one with tokenizer.eos_token = '…' and save it."
        raise DataError(f"the tokenizer of {spec.name} has no end-of-sequence token. {fix}")
    can = packing is not False and supports_packing(spec, attention)
    if packing and not can:
        raise DataError(f"packing: {spec.architecture} does not keep packed documents apart. Leave packing open.")
    return can


def _tokenizer_state(tokenizer: Any) -> list[Any]:
    """Return everything that decides how the tokenizer encodes a text."""
    state = [type(tokenizer).__name__, tokenizer.special_tokens_map, tokenizer.chat_template]
    if not tokenizer.is_fast:
        return [*state, tokenizer.get_vocab(), str(sorted(tokenizer.init_kwargs.items(), key=str))]
    # Truncation and padding are those of the last call.
    return [*state, {**json.loads(tokenizer.backend_tokenizer.to_str()), "truncation": None, "padding": None}]


def _write(folder: Path, rows: Iterable[Columns], counts: Counts, about: dict[str, Any]) -> None:
    """Write rows as a new folder; `counts` is complete once `rows` is used up; `about` is the rest."""
    folder.mkdir()
    count = 0
    with ExitStack() as stack:
        names = column_names(about["packed"])
        files = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in names}
        for row in rows:
            count += 1
            for name, file in files.items():
                file.write(row[name].astype("<i4").tobytes())
    if not count:
        raise DataError(
            f"data: no token to train on: {counts.documents} documents gave {counts.dropped} rows, none with a trained"
            f" label. Give more text, a --seq-len above {about['seq_len']} where prompts fill it, or --no-mask-prompts."
        )
    meta = {**about, **dataclasses.asdict(counts), "count": count}
    (folder / META).write_text(json.dumps(meta, indent=2), encoding="utf-8")
