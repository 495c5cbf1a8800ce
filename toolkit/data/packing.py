"""Documents → rows of equal length: packed where the model keeps documents apart by position, else padded."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from toolkit.data.encoder import Encoded
from toolkit.models import ModelSpec

if TYPE_CHECKING:
    import numpy as np

    Columns = dict[str, np.ndarray[Any, Any]]

IGNORED = -100
"""The label that trains nothing: transformers' and torch's own."""

OPEN_ROWS = 64
"""Rows that a prompt or conversation may still be fitted into."""

PACKED, PADDED = ("input_ids", "labels", "position_ids"), ("input_ids", "labels", "attention_mask")
"""Columns of a row, int32 [seq_len] each."""

_MASKS = re.compile(r"create_\w*causal_mask")
_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_STATEFUL = re.compile(r"Mamba|Mixer\b|Recurrent|SSM|DeltaNet|Linear\w*Attention|Lightning|Conv|Rwkv|LSTM|KDA")


@dataclass(kw_only=True)
class Counts:
    """What became of the documents."""

    documents: int = 0
    tokens: int = 0
    """In the rows that were kept, padding not counted."""
    trained_tokens: int = 0
    truncated: int = 0
    """Prompts and conversations that were longer than a row, and lost their end."""
    dropped: int = 0
    """Rows without a trained label, left out."""


def supports_packing(spec: ModelSpec) -> bool:
    """Return whether the model separates the documents of a row where `position_ids` restart at 0, without a mask.

    transformers finds packed documents in `masking_utils._preprocess_mask_arguments`, and only if the model hands its
    `position_ids` to every causal mask that it creates: some do not (OPT, Falcon: their packed documents see each
    other). So this reads the model's source: `forward` takes `position_ids`, every `create_*causal_mask` call is given
    them, every kind of layer is attention, and none keeps a state (Mamba, linear attention, convolutions), which a mask
    does not reset. A model composed of several (images and text) and an unknown one are padded: that is right for all.

    It holds with the KV cache off, as `load` sets it, in evaluation too: with `use_cache` the mask is silently not
    packed. Flash attention reads the positions for one row a batch only: see `Rows.batch`.
    """
    import transformers

    cls = getattr(transformers, spec.architecture, None)
    if spec.runs_code:  # its class may have the name of another one in transformers
        return False
    if spec.kind != "causal" or cls is None or "position_ids" not in inspect.signature(cls.forward).parameters:
        return False
    config = spec.config
    composed = any(isinstance(part, dict) and "model_type" in part for part in config.values())
    if composed or not config.get("is_causal", True) or not set(config.get("layer_types") or ()) <= _LAYERS:
        return False
    return _masks_by_position(inspect.getsource(sys.modules[cls.__module__]))


@lru_cache
def _masks_by_position(source: str) -> bool:
    """Return whether a modeling file passes `position_ids` to every causal mask and has no stateful layer."""
    nodes = list(ast.walk(ast.parse(source)))
    if any(isinstance(node, ast.ClassDef) and _STATEFUL.search(node.name) for node in nodes):
        return False
    # Arguments are also given as `**mask_kwargs`: then a dictionary must be written out with that key.
    keys = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys]
    written = any(isinstance(key, ast.Constant) and key.value == "position_ids" for key in keys)
    # And the function may be chosen first: `mask_function = create_causal_mask if … else …`.
    chosen = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp | ast.Name)]
    names = {ast.unparse(node.targets[0]) for node in chosen if _MASKS.search(ast.unparse(node.value))}
    calls = [(ast.unparse(node.func), node) for node in nodes if isinstance(node, ast.Call)]
    arguments = [
        {word.arg for word in call.keywords} for name, call in calls if _MASKS.fullmatch(name) or name in names
    ]
    return bool(arguments) and all("position_ids" in names or (None in names and written) for names in arguments)


def pack_rows(
    encoded: Iterable[Encoded], counts: Counts, *, kind: str, packed: bool, seq_len: int, pad: int
) -> Iterator[Columns]:
    """Yield rows in a fixed order, without those that have no trained label; `counts` counts the documents.

    A text flows on from row to row: what a row has no room for goes on in the next one as a document of its own.
    Prompts and conversations are never cut in two, only truncated to `seq_len`. For `seq2seq` the prompt is the input
    and the completion the labels; of a text, each 2 × `seq_len` tokens (or what is left) are a row, the first half the
    input and the second the labels.
    """
    make = _seq2seq if kind == "seq2seq" else _packed if packed else _padded
    for row in make(_count_documents(encoded, counts), counts, seq_len, pad):
        columns = row.columns()
        trained = int((columns["labels"] != IGNORED).sum())
        if trained:
            counts.tokens += row.tokens
            counts.trained_tokens += trained
            yield columns
        else:
            counts.dropped += 1


def _count_documents(encoded: Iterable[Encoded], counts: Counts) -> Iterator[Encoded]:
    for document in encoded:
        counts.documents += 1
        yield document


class _Row:
    """A row that is being filled."""

    def __init__(self, seq_len: int, pad: int, names: tuple[str, ...]) -> None:
        import numpy as np

        self.tokens, self.left, self._names, self._np = 0, seq_len, names, np
        self.ids = np.full(seq_len, pad, np.int32)
        self.labels = np.full(seq_len, IGNORED, np.int32)
        # A row that is never filled counts as one more document.
        self.positions = np.arange(seq_len, dtype=np.int32)
        self.mask = np.zeros(seq_len, np.int32)

    def put(self, document: Encoded, start: int = 0) -> int:
        """Put in as much of the document, from `start`, as there is room for; returns how much."""
        np, at = self._np, self.tokens
        count = min(self.left, len(document.ids) - start)
        ids = np.asarray(document.ids[start : start + count], np.int32)
        self.ids[at : at + count] = ids
        self.labels[at : at + count] = np.where(np.asarray(document.trained[start : start + count], bool), ids, IGNORED)
        # The token before belongs to another document, or to none: it must not predict this one.
        self.labels[at] = IGNORED
        self.mask[at : at + count] = 1
        self.positions[at:] = np.arange(len(self.positions) - at)
        self.positions[at + count :] = np.arange(len(self.positions) - at - count)
        self.tokens, self.left = at + count, self.left - count
        return count

    def put_pair(self, source: list[int], target: list[int]) -> _Row:
        """Put in an encoder's input and a decoder's labels; the model shifts the labels, so the first is trained."""
        self.ids[: len(source)], self.mask[: len(source)], self.labels[: len(target)] = source, 1, target
        self.tokens = len(source) + len(target)
        return self

    def columns(self) -> Columns:
        """Return the requested columns, int32 [seq_len] each."""
        arrays = {
            "input_ids": self.ids,
            "labels": self.labels,
            "position_ids": self.positions,
            "attention_mask": self.mask,
        }
        return {name: arrays[name] for name in self._names}


def _packed(documents: Iterable[Encoded], counts: Counts, seq_len: int, pad: int) -> Iterator[_Row]:
    text, waiting = _Row(seq_len, pad, PACKED), list[_Row]()
    for document in documents:
        if not document.whole:
            at = 0
            while at < len(document.ids):
                at += text.put(document, at)
                if not text.left:
                    yield text
                    text = _Row(seq_len, pad, PACKED)
            continue
        counts.truncated += len(document.ids) > seq_len
        size = min(len(document.ids), seq_len)
        row = next((row for row in waiting if row.left >= size), None)
        if row is None:
            if len(waiting) == OPEN_ROWS:
                yield waiting.pop(min(range(OPEN_ROWS), key=lambda index: waiting[index].left))
            row = _Row(seq_len, pad, PACKED)
            waiting.append(row)
        row.put(document)
        if not row.left:
            waiting.remove(row)
            yield row
    yield from (row for row in (text, *waiting) if row.tokens)


def _padded(documents: Iterable[Encoded], counts: Counts, seq_len: int, pad: int) -> Iterator[_Row]:
    for document in documents:
        counts.truncated += document.whole and len(document.ids) > seq_len
        for start in range(0, 1 if document.whole else len(document.ids), seq_len):
            row = _Row(seq_len, pad, PADDED)
            row.put(document, start)
            yield row


def _seq2seq(documents: Iterable[Encoded], counts: Counts, seq_len: int, pad: int) -> Iterator[_Row]:
    for document in documents:
        ids = list(document.ids)
        if document.whole:
            source, target = ids[: document.split], ids[document.split :]
            counts.truncated += max(len(source), len(target)) > seq_len
            yield _Row(seq_len, pad, PADDED).put_pair(source[:seq_len], target[:seq_len])
            continue
        for start in range(0, len(ids), 2 * seq_len):
            piece = ids[start : start + 2 * seq_len]
            half = (len(piece) + 1) // 2
            yield _Row(seq_len, pad, PADDED).put_pair(piece[:half], piece[half:])
