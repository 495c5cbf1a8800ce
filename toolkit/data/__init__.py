"""Text, JSONL, chat and Hub datasets → packed, masked rows; the embedded text and its tokenizer.

In order: `reading` (a source → documents), `encoding` (a document → token ids, and which of them are trained),
`packing` (documents → rows of equal length), `building` (all of that once, into the cache), `rows` (what is read from
there), `batching` (which rows a rank takes when).
"""

from toolkit.data.batching import (
    Order,
    batches,
    check_batch,
    eval_batches,
    hash_ids,
    sample_ids,
    spell_samples,
)
from toolkit.data.building import prepare_data
from toolkit.data.embedded import embedded_files, embedded_tokenizer
from toolkit.data.packing import packs
from toolkit.data.reading import Document, check_source, documents
from toolkit.data.rows import Rows, open_rows

__all__ = [
    "Document",
    "Order",
    "Rows",
    "batches",
    "check_batch",
    "check_source",
    "documents",
    "embedded_files",
    "embedded_tokenizer",
    "eval_batches",
    "hash_ids",
    "open_rows",
    "packs",
    "prepare_data",
    "sample_ids",
    "spell_samples",
]
