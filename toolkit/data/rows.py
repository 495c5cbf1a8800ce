"""Rows of equal length in the cache: made once of a source, a tokenizer and settings, read by every rank as memory maps."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.run_config import TOO_LONG, TRAIN_ON
from toolkit.config.tables import ATTENTIONS
from toolkit.core.cache import cache_folder, recall, sealed
from toolkit.core.display import Result, Table
from toolkit.core.errors import DataError, StrategyError
from toolkit.data.ingestion import Contents, cache_errors, draft_folder, ingest
from toolkit.data.packing import IGNORED, Columns, Counts, pack_rows
from toolkit.data.tokenization import Encoder, read_template, tokenize
from toolkit.models import ModelSpec
from toolkit.models.varlen import document_bounds, separates_documents

if TYPE_CHECKING:
    import numpy as np

META = "meta.json"

ROWS_FORMAT = 2
"""Version of the cached rows. Raise it when their content changes, so that older rows are not taken for new ones."""


@dataclass(frozen=True, kw_only=True)
class Rows(Result):
    """A data set, ready to train on: rows of `seq_len` tokens. A sample's id is its row's index."""

    folder: Path
    """The folder of `input_ids.bin` and the other columns: little-endian int32 [count, seq_len]."""
    fingerprint: str
    """sha256 of the data's bytes, the tokenizer, the settings and this format: equal fingerprints, equal rows."""
    count: int
    seq_len: int
    documents: int
    tokens: int
    """Without padding."""
    trained_tokens: int
    """Tokens with a label."""
    truncated: int
    """Prompts and conversations longer than a row, which lost their end."""
    dropped: int
    """Rows without a trained token, left out."""
    longest: int
    """Tokens of the longest document."""
    too_long: int
    """Documents longer than a row, left out under `too_long` drop."""
    remarks: dict[str, int]
    """Key of `chat_template.REMARKS` → documents: what is worth a warning."""
    packed: bool
    """Several documents a row, kept apart by `position_ids`; else one a row, padded, with `attention_mask`."""
    kind: str
    """`causal` or `seq2seq`."""
    pad_token_id: int

    @cached_property
    def columns(self) -> dict[str, np.ndarray[Any, Any]]:
        """The columns as read-only memory maps, int32 [count, seq_len]."""
        import numpy as np

        shape, names = (self.count, self.seq_len), column_names(self.packed)
        return {name: np.memmap(self.folder / f"{name}.bin", "<i4", "r", shape=shape) for name in names}

    def batch(self, ids: Sequence[int], *, attention: str = "sdpa") -> dict[str, Any]:
        """Return the inputs of the model's forward, int64 [len(ids), seq_len]; a row with the id -1 is not trained.

        `input_ids`, `labels` (not shifted; -100 trains nothing) and, packed,
        `position_ids`, else `attention_mask`. Under `flash_attention_*` and `varlen` packed rows are joined into one,
        [1, len(ids) × seq_len], with the documents' bounds: without these, transformers' flash attention keeps documents
        apart in a batch of one only, and silently does not in a larger one (`_is_packed_sequence`). Losses are the same:
        a row's first label is never trained.
        """
        import numpy as np
        import torch

        index = np.asarray(ids, np.int64)
        arrays = {name: column[np.maximum(index, 0)].astype(np.int64) for name, column in self.columns.items()}
        batch = {name: torch.from_numpy(values) for name, values in arrays.items()}
        batch["labels"][torch.from_numpy(index < 0)] = IGNORED
        if self.packed and ATTENTIONS[attention].joins_rows:
            joined = {name: column.reshape(1, -1) for name, column in batch.items()}
            return {**joined, **document_bounds(joined["position_ids"])}
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """Leave the memory maps out: pickle would copy the data."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def tables(self) -> list[Table]:
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("folder", "pad_token_id")]
        return [Table(title="Data", columns=("field", "value"), rows=[(name, getattr(self, name)) for name in names])]


def column_names(packed: bool) -> tuple[str, ...]:
    """Return the columns of a row, int32 [seq_len] each."""
    return ("input_ids", "labels", "position_ids" if packed else "attention_mask")


def find_rows(fingerprint: str) -> Rows | None:
    """Open the rows with this fingerprint if the cache has them, and each file has its length."""
    folder = cache_folder("data") / fingerprint

    def decode(meta: dict[str, Any]) -> Rows:
        rows = Rows(folder=folder, **meta)
        sizes = {(folder / f"{name}.bin").stat().st_size for name in column_names(rows.packed)}
        if rows.fingerprint != fingerprint or sizes != {rows.count * rows.seq_len * 4}:
            raise ValueError("other rows")
        return rows

    return recall(folder / META, decode)


def prepare_data(
    source: str | Path | Contents | None,
    tokenizer: Any,
    spec: ModelSpec,
    *,
    seq_len: int,
    mask_prompts: bool = True,
    chat_template: str | Path | None = None,
    packing: bool | None = None,
    attention: str = "sdpa",
    train_on: str = TRAIN_ON[0],
    add_end_token: bool = False,
    too_long: str = TOO_LONG[0],
    **reading: Any,
) -> Rows:
    """Tokenize a source once, into `$XDG_CACHE_HOME/accelerate-toolkit/data`, and open what is there.

    Unchanged files are not read again. Ranks that come at once wait for the first.

    Args:
        source: as `sources.find_source` takes it, or the result of `ingest`; None is the embedded text.
        tokenizer: as `models.hf_loading.load_tokenizer` returns it, with a token to pad with.
        mask_prompts: train on completions and the assistant's turns only. A text has no prompts.
        chat_template: a file with a Jinja template, or its text, in place of the tokenizer's own.
        packing: None packs where `supports_packing(spec, attention)`; True where it does not is refused.
        attention: the kernel of the training.
        train_on: `all-turns` of the assistant in a conversation, or its `last-turn`.
        add_end_token: close a conversation that its template leaves open.
        too_long: what happens to prompts and conversations longer than a row: `cut`, `drop`, `split` or `refuse`.
        reading: of a source: `text_column`, `columns`, `data_format` and `seed`, as `ingest` takes them.

    Raises:
        DataError: for anything in source, tokenizer or template that cannot be trained on; names file and line.
        StrategyError: for a `seq_len` over the model's limit.
    """
    packed = check_request(tokenizer, spec, seq_len, packing, attention)
    contents = source if isinstance(source, Contents) else ingest(source, **reading)
    if mask_prompts and contents.untrained:
        raise DataError(
            f"data {contents.name}: {contents.untrained}. Name its roles 'user' and 'assistant', or use --no-mask-prompts."
        )
    encoder = Encoder(
        tokenizer=tokenizer,
        mask_prompts=mask_prompts,
        template=read_template(chat_template),
        seq2seq=spec.kind == "seq2seq",
        train_on=train_on,
        add_end_token=add_end_token,
    )
    about = {"seq_len": seq_len, "packed": packed, "kind": spec.kind, "pad_token_id": tokenizer.pad_token_id}
    settings = {**about, "format": ROWS_FORMAT, "too_long": too_long, "encoder": encoder.settings}
    key = json.dumps([settings, _tokenizer_state(tokenizer), contents.hash], sort_keys=True)
    fingerprint = hashlib.sha256(key.encode()).hexdigest()
    counts = Counts()
    size = {"packed": packed, "seq_len": seq_len, "pad": tokenizer.pad_token_id, "too_long": too_long}
    rows = pack_rows(tokenize(contents, encoder), counts, kind=spec.kind, **size)  # which begins when it is iterated
    return _keep(rows, counts, {**about, "fingerprint": fingerprint})


def _keep(rows: Iterable[Columns], counts: Counts, about: dict[str, Any]) -> Rows:
    """Write rows into the cache, unless they are there."""
    from filelock import FileLock

    fingerprint = about["fingerprint"]
    folder = cache_folder("data") / fingerprint
    with cache_errors(folder.parent), FileLock(folder.with_suffix(".lock")):
        if find_rows(fingerprint) is None:
            with draft_folder(folder.parent, fingerprint) as work:
                _write(work / "rows", rows, counts, about)
                if os.path.lexists(folder):
                    folder.rename(work / "damaged")
                (work / "rows").rename(folder)
    result = find_rows(fingerprint)
    assert result is not None, "they were written under a lock"
    return result


def supports_packing(spec: ModelSpec, attention: str = "sdpa") -> bool:
    """Return whether the model keeps documents of a row apart, by its positions, under this attention kernel."""
    return separates_documents(spec, joined=ATTENTIONS[attention].joins_rows)


def check_request(tokenizer: Any, spec: ModelSpec, seq_len: int, packing: bool | None, attention: str) -> bool:
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
            f" label, and {counts.too_long} were too long. Give more text, a --seq-len above {about['seq_len']} where prompts"
            " fill it, or --no-mask-prompts."
        )
    meta = {**about, **dataclasses.asdict(counts), "count": count}
    (folder / META).write_bytes(sealed(META, json.dumps(meta).encode()))
