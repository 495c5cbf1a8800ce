"""Turn text, JSONL, chat and Hub datasets into packed, masked rows; the embedded text, tokenizer and model.

In order: `sources` (a name → files), `files` (files → documents), `ingestion` (documents → the cache, once), `encoder` (a
document → token ids and trained positions), `tokenization` (all documents, in several processes), `packing` (documents → rows
of equal length), `preparation` (all of these once, into the cache), `rows` (reads the cache), `batching` (the rows of a rank).
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
from toolkit.data.embedded import embedded_files, embedded_model, embedded_tokenizer, resolve_spec
from toolkit.data.files import Document, documents
from toolkit.data.ingestion import Contents, ingest
from toolkit.data.packing import supports_packing
from toolkit.data.preparation import prepare_data
from toolkit.data.rows import Rows, find_rows, open_rows
from toolkit.data.sources import find_source

__all__ = [
    "Contents",
    "Document",
    "Order",
    "Rows",
    "batches",
    "check_batch",
    "documents",
    "embedded_files",
    "embedded_model",
    "embedded_tokenizer",
    "eval_batches",
    "find_rows",
    "find_source",
    "hash_ids",
    "ingest",
    "open_rows",
    "prepare_data",
    "resolve_spec",
    "sample_ids",
    "spell_samples",
    "supports_packing",
]
