"""What a data set trains, before a run: its first documents as tokens, with the trained ones marked, and figures of a sample."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import json
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby, islice, repeat, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.run_config import EMBEDDED, RunConfig
from toolkit.config.train_config import TrainConfig
from toolkit.core.display import Result, Table
from toolkit.core.redaction import redact, visible
from toolkit.core.units import ceil_div

if TYPE_CHECKING:
    from toolkit.data.files import Document
    from toolkit.data.tokenization import Encoded
    from toolkit.models import ModelSpec

SAMPLE_DOCUMENTS, SAMPLE_CHARACTERS = 20_000, 500_000
"""The sample ends at either of them."""

SHOWN_DOCUMENTS, SHOWN_TOKENS = 3, 400
"""Documents that are shown, and tokens of each."""

BINS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Upper ends of the histogram of lengths, in tokens; one more bin holds what is longer."""


@dataclass(frozen=True, kw_only=True)
class Preview(Result):
    """The first documents of a data set, and figures of them."""

    json_fields = "model data format counts lengths rows warnings"

    model: str
    data: str
    format: str
    """How its rows are read: `alpaca`, `messages`, `text`, …"""
    counts: dict[str, Any]
    """Figures of the documents in the sample. `complete`: the sample is the whole data set."""
    lengths: dict[str, int]
    """Tokens up to which → documents."""
    rows: list[dict[str, Any]]
    """A document each: `input_ids`, and in `trained` the texts of its trained spans, in order."""
    warnings: list[str]
    shown: list[list[tuple[bool, list[str]]]]
    """Of the first documents: runs of tokens as text, and whether they are trained."""

    def headline(self) -> str:
        counts = self.counts
        sample = "Its" if counts["complete"] else "A sample: the first"
        share = counts["trained_tokens"] / max(1, counts["tokens"])
        return (
            f"{self.data}: {self.format}. {sample} {counts['documents']:,} documents have {counts['tokens']:,} tokens,"
            f" {share:.1%} of them trained, and fill {counts['rows']:,} rows of {counts['seq_len']:,} with"
            f" {counts['padding']:.1%} padding."
        )

    def tables(self) -> list[Table]:
        figures = [(name.replace("_", " "), value) for name, value in self.counts.items() if name != "padding"]
        most = max(self.lengths.values(), default=1)
        bars = [(name, count, "█" * -(-30 * count // most)) for name, count in self.lengths.items()]
        return [
            Table(title="Documents", columns=("count", "value"), rows=figures, notes=self.warnings),
            Table(title="Lengths in tokens", columns=("up to", "documents", ""), rows=bars),
        ]

    def __str__(self) -> str:
        color = sys.stdout.isatty()
        mark = (lambda text: f"\x1b[32m{text}\x1b[0m") if color else (lambda text: f"[{text}]")
        note = "Trained tokens are green." if color else "Trained tokens are in brackets."
        return "\n\n".join([super().__str__(), f"{note} A dot separates tokens.", *self._texts(mark, visible)])

    def _repr_html_(self) -> str:
        texts = self._texts(lambda text: f"<mark>{text}</mark>", lambda text: html.escape(visible(text)))
        style = "white-space:pre-wrap;text-align:left"
        return "".join([super()._repr_html_(), *(f'<pre style="{style}">{text}</pre>' for text in texts)])

    def _texts(self, mark: Callable[[str], str], escape: Callable[[str], str]) -> Iterator[str]:
        for number, runs in enumerate(self.shown):
            texts = [(trained, escape(redact("·".join(tokens)))) for trained, tokens in runs]
            yield f"{number + 1}. " + "·".join(mark(text) if trained else text for trained, text in texts)


def preview(
    model: str | Path | ModelSpec = EMBEDDED,
    data: str | Path = EMBEDDED,
    *,
    run_config: RunConfig | None = None,
    seq_len: int = TrainConfig().seq_len,
    attention: str = "sdpa",
    **fields: Any,
) -> Preview:
    """Show what a data set trains, from its first documents. Starts no run, and reads no weights.

    Args:
        model: as `describe` takes it; its tokenizer and chat template are used.
        data: as `--data` takes it.
        run_config: the request; fields of it may be given alone, such as `train_on="last-turn"`.
        seq_len: tokens of a row.
        attention: the kernel of the training, which decides about packing.

    Raises:
        ToolkitError: for a model or data that cannot be used; names file and line.
    """
    from toolkit.data import find_source
    from toolkit.data.files import Findings, documents
    from toolkit.data.packing import Counts, pack_rows
    from toolkit.data.sources import split_weights
    from toolkit.models.chat_template import spell_remarks

    config = dataclasses.replace(run_config or RunConfig(), **fields)
    seq_len = TrainConfig(seq_len=seq_len).seq_len  # which checks it
    findings = Findings()
    reading = {name: getattr(config, name) for name in ("text_column", "columns", "data_format")}
    sources = [(find_source(name), weight) for name, weight in split_weights(data)]
    sample, complete = _sample(
        [(each.name, weight, documents(each, findings=findings, **reading)) for each, weight in sources]
    )
    spec, tokenizer, packed = _model(model, config, seq_len, attention)
    encoded, counts = _encode(sample, tokenizer, spec, config, seq_len), Counts()
    size: dict[str, Any] = {"packed": packed, "seq_len": seq_len, "pad": tokenizer.pad_token_id}
    rows = sum(1 for _ in pack_rows(encoded, counts, kind=spec.kind, too_long=config.too_long, **size))
    figures = {name: value for name, value in vars(counts).items() if name != "remarks"}
    padding = 1 - counts.tokens / (max(1, rows) * seq_len * (2 if spec.kind == "seq2seq" else 1))
    untrained = [] if rows else ["No row has a trained token: a training refuses these data."]
    return Preview(
        model=spec.name,
        data=str(data),
        format=", ".join(findings.names),
        counts={**figures, "rows": rows, "seq_len": seq_len, "padding": padding, "complete": complete},
        lengths=_histogram([len(document.ids) for document in encoded]),
        rows=[_row(document, tokenizer) for document in encoded],
        warnings=[
            *filter(None, (each.summary for each, _ in sources)),
            *findings.formats,
            *spell_remarks(counts.remarks, counts.documents),
            *filter(None, [findings.problem()]),
            *untrained,
        ],
        shown=[
            [(flag, [tokenizer.decode([token]) for token in ids]) for flag, ids in _runs(document, SHOWN_TOKENS)]
            for document in encoded[:SHOWN_DOCUMENTS]
        ],
    )


def _encode(sample: list[Document], tokenizer: Any, spec: ModelSpec, config: RunConfig, seq_len: int) -> list[Encoded]:
    """Tokenize documents and mark what is trained, as a training does."""
    from toolkit.data.tokenization import Encoder, read_template

    encoder = Encoder(
        tokenizer=tokenizer,
        mask_prompts=config.mask_prompts,
        template=read_template(config.chat_template),
        seq2seq=spec.kind == "seq2seq",
        train_on=config.train_on,
        add_end_token=config.add_end_token,
    )
    encoded = list(encoder.encode(sample))
    return [_halved(document, seq_len) for document in encoded] if spec.kind == "seq2seq" else encoded


def _model(
    model: str | Path | ModelSpec, config: RunConfig, seq_len: int, attention: str
) -> tuple[ModelSpec, Any, bool]:
    """Return a model's description and tokenizer, and whether its rows are packed."""
    from toolkit.data import resolve_spec
    from toolkit.data.rows import check_request
    from toolkit.models import ModelSpec
    from toolkit.models.hf_loading import load_tokenizer

    quick = None if isinstance(model, ModelSpec) or config.trust_remote_code else _quick_spec(str(model))
    spec = model if isinstance(model, ModelSpec) else quick or resolve_spec(str(model), config.trust_remote_code)
    tokenizer = load_tokenizer(spec)
    packing = None if config.packing and not quick else False
    packed = check_request(tokenizer, spec, seq_len, packing, attention)
    return spec, tokenizer, packed or (config.packing and quick is not None)  # well-known models keep documents apart


def _halved(document: Encoded, seq_len: int) -> Encoded:
    """Mark what an encoder-decoder learns of a text: of each 2 × `seq_len` tokens the second half (`packing.pack_rows`)."""
    if document.atomic:
        return document
    size = len(document.ids)
    lengths = [min(2 * seq_len, size - start) for start in range(0, size, 2 * seq_len)]
    halves = [[False] * ceil_div(length, 2) + [True] * (length // 2) for length in lengths]
    return dataclasses.replace(document, trained=list(chain.from_iterable(halves)))


def _row(document: Encoded, tokenizer: Any) -> dict[str, Any]:
    """Return a document's tokens, and the texts of its trained spans."""
    spans = [tokenizer.decode(ids) for flag, ids in _runs(document) if flag]
    return {"input_ids": list(map(int, document.ids)), "trained": spans}


def _quick_spec(model: str) -> ModelSpec | None:
    """Return the few facts that a preview needs of a well-known causal model that was not described before, without torch."""
    from toolkit.data.embedded import embedded_model
    from toolkit.models.hf_loading import TOKENIZERS
    from toolkit.models.remote_code import check_links
    from toolkit.models.resolution import config_text, locate
    from toolkit.models.spec import ModelSpec, recall

    source, path, hub = locate(str(embedded_model()) if model == EMBEDDED else model)
    text = config_text(path) if path else None
    if text is None or path is None or recall(text):
        return None
    if not hub:
        check_links(path.parent)
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):  # `describe` reports the error
        config = json.loads(text)
        (architecture,), vocab = config["architectures"], config["vocab_size"]
        positions = config.get("max_position_embeddings", config.get("n_positions"))
        if (
            config["model_type"] in TOKENIZERS
            and architecture.endswith(("ForCausalLM", "LMHeadModel"))
            and vocab
            and positions
        ):
            facts: Any = {"config": config, "vocab": vocab, "max_positions": positions, "architecture": architecture}
            empty: Any = dict.fromkeys(("parameters", "tied", "linears", "blocks", "attentions"), ())
            return ModelSpec(name=model, source=source, kind="causal", layers=0, hidden=0, heads=0, **facts, **empty)
    return None


def _sample(sources: list[tuple[str, float, Iterator[Document]]]) -> tuple[list[Document], bool]:
    """Return the first documents of all sources in turn, as many as the weights say, and whether they are all."""
    from toolkit.data.ingestion import draw

    samples: list[list[Document]] = [[] for _ in sources]
    size, left = 0, set(range(len(sources)))
    while left and sum(map(len, samples)) < SAMPLE_DOCUMENTS and size <= SAMPLE_CHARACTERS:
        for number in sorted(left):
            for document in islice(sources[number][2], 1):
                samples[number].append(document)
                size += sum(len(value if isinstance(value, str) else str(value)) for value in document.content.values())
                break
            else:
                left.remove(number)
    complete = not any(next(sources[number][2], None) for number in left)
    taken: list[Iterator[Document]] = []
    for number, ((name, weight, _), sample) in enumerate(zip(sources, samples, strict=True)):
        weight = weight if complete else max(weight, 1 / len(sample))
        times = draw(name, len(sample), weight, (TrainConfig().seed, number))
        taken.append(chain.from_iterable(map(repeat, sample, times.tolist())))
    return [document for each in zip_longest(*taken) for document in each if document], complete


def _runs(document: Encoded, limit: int | None = None) -> Iterator[tuple[bool, list[int]]]:
    """Yield runs of tokens that are trained, or are not."""
    pairs = zip(document.trained[:limit], document.ids[:limit], strict=True)
    for flag, run in groupby(pairs, lambda pair: pair[0]):
        yield bool(flag), [int(token) for _, token in run]


def _histogram(lengths: list[int]) -> dict[str, int]:
    """Return the documents of each bin, from the first filled one to the last."""
    counts = [0] * (len(BINS) + 1)
    for length in lengths:
        counts[bisect_left(BINS, length)] += 1
    filled = [number for number, count in enumerate(counts) if count]
    names = [*map(str, BINS), f"over {BINS[-1]}"]
    return {names[number]: counts[number] for number in range(min(filled), max(filled) + 1)} if filled else {}
