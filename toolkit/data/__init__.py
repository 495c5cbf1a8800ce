"""Turn text, JSONL, chat and Hub datasets into packed, masked rows; the embedded text, tokenizer and model.

In order: `sources` (a name → files), `files` (files → documents), `ingestion` (documents → the cache, once), `tokenization`
(documents → token ids and trained positions), `packing` (documents → rows of equal length), `rows` (all of these once, into
the cache), `batching` (the rows of a rank).
"""

from toolkit.data.batching import Order as Order
from toolkit.data.batching import batches as batches
from toolkit.data.batching import check_batch as check_batch
from toolkit.data.batching import eval_batches as eval_batches
from toolkit.data.batching import hash_ids as hash_ids
from toolkit.data.batching import one_document as one_document
from toolkit.data.batching import sample_ids as sample_ids
from toolkit.data.batching import spell_samples as spell_samples
from toolkit.data.embedded import embedded_files as embedded_files
from toolkit.data.embedded import embedded_model as embedded_model
from toolkit.data.embedded import embedded_tokenizer as embedded_tokenizer
from toolkit.data.embedded import resolve_spec as resolve_spec
from toolkit.data.files import documents as documents
from toolkit.data.ingestion import Contents as Contents
from toolkit.data.ingestion import ingest as ingest
from toolkit.data.rows import Rows as Rows
from toolkit.data.rows import find_rows as find_rows
from toolkit.data.rows import prepare_data as prepare_data
from toolkit.data.rows import supports_packing as supports_packing
from toolkit.data.sources import find_source as find_source
