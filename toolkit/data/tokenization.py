"""Documents → token ids, and which of them are trained; of many documents in several processes."""

from __future__ import annotations

import copy
import multiprocessing
import os
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from toolkit.config.run_config import TRAIN_ON
from toolkit.core.atomic_io import LONGEST_JSON, expand_user, read_limited
from toolkit.core.display import progress_bar
from toolkit.core.errors import DataError
from toolkit.core.process_lifecycle import begin_child
from toolkit.core.stopping import hold_signals
from toolkit.data.files import Document
from toolkit.data.ingestion import Batch, Contents
from toolkit.models.chat_template import ChatTemplate, Rendered

BATCH_TEXTS, BATCH_CHARACTERS = 512, 2**20
"""Texts that are given to the tokenizer at once end at either: it takes some 160 bytes for each character."""

_TRIMS = b'"trim_offsets":true'
"""In the state of a post-processor: offsets without the whitespace of a token."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A document's tokens."""

    ids: Sequence[int]
    trained: Sequence[bool]
    """Whether the model learns to predict this token. Same length as `ids`. An array, except for pairs."""
    atomic: bool = False
    """A prompt or conversation, which is never cut in two unless asked for; a text may be."""
    split: int = 0
    """The start of the completion, which an encoder-decoder model's decoder sees. 0 in a text."""
    where: str = ""
    """File and line, for messages."""
    remarks: Sequence[str] = ()
    """Keys of `chat_template.REMARKS`."""


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A tokenizer, and how it is used here."""

    tokenizer: Any
    """With a token that ends a sequence."""
    mask_prompts: bool = True
    template: str | None = None
    """The chat template's text; None uses the tokenizer's own."""
    seq2seq: bool = False
    train_on: str = TRAIN_ON[0]
    add_end_token: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Everything but the tokenizer."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "tokenizer"}

    def encode(self, documents: Iterable[Document]) -> Iterator[Encoded]:
        """Encode documents in order; the end-of-sequence token closes a text and a completion.

        A document becomes one text, which is tokenized once: prompt and completion in one, a conversation as the chat template
        renders it. A token over the border of what is trained is trained. Only an encoder-decoder's prompt and completion
        are two texts.

        Raises:
            DataError: for messages without a chat template, or a turn that cannot be located in the rendered text.
        """
        chat = not self.seq2seq and bool(self.template or self.tokenizer.chat_template)
        for kind, alike in groupby((document.resolve(chat) for document in documents), lambda each: each.kind):
            if kind == "prompt" and self.seq2seq:
                while some := list(islice(alike, BATCH_TEXTS)):
                    yield from self._pairs(some)
            else:
                for texts in _batches(map(self._render, alike)):
                    yield from self._encode(texts, special=kind != "messages")

    def _render(self, document: Document) -> Rendered:
        content, where = document.content, document.where
        remarks = ["joined"] if document.joined else []
        if document.kind == "messages":
            options = {"mask": self.mask_prompts, "last": self.train_on == "last-turn", "end": self.add_end_token}
            return self._chat_template(document).conversation(content, where, **options)
        if document.kind == "text":
            return Rendered(text=content["text"], spans=None, where=where, atomic=False, closed=True)
        text = content["prompt"] + content["completion"]
        spans = [(len(content["prompt"]), len(text))] if self.mask_prompts else None
        return Rendered(text=text, spans=spans, where=where, closed=True, remarks=remarks)

    def _tokens(self, texts: list[str], special: bool) -> list[tuple[list[int], Any]]:
        """Return each text's ids, and its encoding by the Rust library; of a slow tokenizer None."""
        if self.tokenizer.is_fast:  # its own call converts each encoding, which takes longer than what is read here
            return [(each.ids, each) for each in self._backend.encode_batch(texts, add_special_tokens=special)]
        # verbose=False: a warning about texts over the model's length means nothing here, since they are cut into rows.
        called = self.tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)
        return [(ids, None) for ids in called["input_ids"]]

    @cached_property
    def _backend(self) -> Any:
        """A copy of the Rust tokenizer without truncation and with a token's whitespace in its offsets. Its ids are the same."""
        backend = copy.deepcopy(self.tokenizer.backend_tokenizer)
        backend.no_truncation()
        backend.no_padding()
        if backend.post_processor is not None and _TRIMS in (state := backend.post_processor.__getstate__()):
            processor = backend.post_processor
            processor.__setstate__(state.replace(_TRIMS, _TRIMS.replace(b"true", b"false")))
            backend.post_processor = processor
        return backend

    def _with_eos(self, ids: list[int]) -> list[int]:
        eos = self.tokenizer.eos_token_id
        return ids if ids and ids[-1] == eos else [*ids, eos]

    def _encode(self, texts: list[Rendered], special: bool) -> Iterator[Encoded]:
        import numpy as np

        masked = any(each.spans is not None for each in texts)
        if masked and not self.tokenizer.is_fast:
            raise DataError(
                f"{texts[0].where}: the tokenizer {self.tokenizer.name_or_path} has no fast version, so tokens have no"
                " places in a text and prompts cannot be masked. Convert it to tokenizer.json, or use --no-mask-prompts."
            )
        for each, (ids, encoding) in zip(texts, self._tokens([each.text for each in texts], special), strict=True):
            trained: Any = np.full(len(ids), each.spans is None)
            for start, end in _token_ranges(each, encoding) if each.spans else ():
                trained[start:end] = True
            remarks = each.remarks
            if special and len(ids) > 1 and ids[0] == ids[1] == self.tokenizer.bos_token_id:
                ids, trained, remarks = ids[1:], trained[1:], [*remarks, "bos"]
            if special and len(ids) > 1 and ids[-1] == ids[-2] == self.tokenizer.eos_token_id:
                ids, trained = ids[:-1], trained[:-1]  # the text brings one, and the tokenizer adds one
            if each.closed and not each.text.rstrip().endswith(self.tokenizer.eos_token):
                ids = self._with_eos(ids)
                trained = np.append(trained[: len(ids) - 1], True)  # the tokenizer may have closed the text
            yield Encoded(ids=ids, trained=trained, atomic=each.atomic, where=each.where, remarks=remarks)

    def _pairs(self, documents: list[Document]) -> Iterator[Encoded]:
        prompts, completions = (
            [ids for ids, _ in self._tokens([document.content[name] for document in documents], name == "prompt")]
            for name in ("prompt", "completion")
        )
        for document, prompt, completion in zip(documents, prompts, map(self._with_eos, completions), strict=True):
            trained = [not self.mask_prompts] * len(prompt) + [True] * len(completion)
            yield Encoded(
                ids=prompt + completion, trained=trained, atomic=True, split=len(prompt), where=document.where
            )

    def _chat_template(self, document: Document) -> ChatTemplate:
        if self.seq2seq:
            raise DataError(
                f"{document.where}: messages train a causal model, and this one is an encoder-decoder. Use prompt and"
                " completion."
            )
        tools = document.content.get("tools") or None
        try:
            template = self.template or (
                self.tokenizer.chat_template and str(self.tokenizer.get_chat_template(tools=tools))
            )
        except ValueError as error:  # several, and none is the default
            names = ", ".join(self.tokenizer.chat_template)
            raise DataError(
                f"{document.where}: the tokenizer has the chat templates {names}, no default. Give one with"
                " --chat-template FILE."
            ) from error
        if not template:
            raise DataError(
                f"{document.where}: has messages, and the tokenizer {self.tokenizer.name_or_path} has no chat template."
                " Give one with --chat-template FILE (a Jinja template), or use prompt and completion."
            )
        return self._templates.setdefault(template, ChatTemplate(self.tokenizer, template))

    @cached_property
    def _templates(self) -> dict[str, ChatTemplate]:
        return {}


def _batches(texts: Iterator[Rendered]) -> Iterator[list[Rendered]]:
    batch: list[Rendered] = []
    size = 0
    for each in texts:
        batch.append(each)
        size += len(each.text)
        if len(batch) == BATCH_TEXTS or size > BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _token_ranges(rendered: Rendered, encoding: Any) -> Iterator[tuple[int, int]]:
    """Yield the ranges of tokens that hold a character of a trained span.

    A token over the end of a span that holds whitespace of the span alone and a following word is not trained: it is the word's.
    """
    text, count = rendered.text, len(encoding)
    while count and not any(encoding.token_to_chars(count - 1) or ()):  # added after the text
        count -= 1
    offsets: list[tuple[int, int]] = []
    for start, end in rendered.spans or ():
        # The tokenizer finds the tokens of two characters faster than Python reads the offsets of all.
        first, last = encoding.char_to_token(start), count if end == len(text) else encoding.char_to_token(end)
        if first is None or last is None:  # whitespace that is in no token
            offsets = offsets or encoding.offsets
            first = bisect_right(offsets, start, 0, count, key=itemgetter(1))
            last = bisect_left(offsets, end, first, count, key=itemgetter(0))
        elif last < count and encoding.token_to_chars(last)[0] < end:
            last += 1
        left, right = encoding.token_to_chars(last - 1) if last > first else (end, end)
        if left < end < right:
            last -= bool(text[left:end].isspace() and text[end:right].strip())
        yield first, last


def read_template(template: str | Path | None) -> str | None:
    """Return a chat template's text, from a file or the text itself (which contains a brace).

    Raises:
        DataError: for a file that cannot be read or is empty.
    """
    if template is None or "{" in str(template):
        return None if template is None else str(template)
    try:
        text = read_limited(expand_user(template), LONGEST_JSON).decode()
        if not text.strip():
            raise ValueError("it is empty")
        return text
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(
            f"chat template {template}: cannot be read: {why}. Give a UTF-8 file with a Jinja template."
        ) from error


# All documents of a source ----------------------------------------------------------------------------------------------

PROCESS_BYTES = 4 << 20
"""Bytes of documents for each process, which take it a second or two: fewer cost less time than another process."""

_work: tuple[Sequence[Batch], Encoder]
"""The documents and the encoder of a worker process; set as it starts."""


def tokenize(contents: Contents, encoder: Encoder) -> Iterator[Encoded]:
    """Yield the documents' tokens in order.

    Raises:
        DataError: as `Encoder.encode`, and for a process that was killed.
    """
    batches, size = contents.batches, sum(batch.size for batch in contents.batches)
    processes = min(len(os.sched_getaffinity(0)), size // PROCESS_BYTES)
    encoded: Iterator[Iterable[Encoded]] = (
        _by_processes(batches, encoder, processes)
        if processes > 1
        else (encoder.encode(batch.documents()) for batch in batches)
    )
    with progress_bar("tokenizing", size, "B") as bar:
        for batch, documents in zip(batches, encoded, strict=True):
            yield from documents
            bar.update(batch.size)


def _by_processes(batches: Sequence[Batch], encoder: Encoder, processes: int) -> Iterator[list[Encoded]]:
    """Yield batches in order; at most two for each process are encoded ahead."""
    others = multiprocessing.active_children()
    ahead: deque[Future[list[Encoded]]] = deque()
    fork = multiprocessing.get_context("fork")
    work = (os.getpid(), batches, encoder)
    pool = ProcessPoolExecutor(processes, mp_context=fork, initializer=_start, initargs=work)
    try:
        for number in range(len(batches)):
            with hold_signals():  # the first one forks all processes
                ahead.append(pool.submit(_encode, number))
            if len(ahead) == 2 * processes:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "tokenizing: a process was killed, most likely for its memory. Split long documents, or free some memory."
        ) from error
    finally:
        for process in set(multiprocessing.active_children()) - set(others):
            process.kill()
        pool.shutdown(cancel_futures=True)


def _start(parent: int, batches: Sequence[Batch], encoder: Encoder) -> None:
    global _work
    begin_child(parent)
    _work = batches, encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of the tokenizer do not survive a fork


def _encode(number: int) -> list[Encoded]:
    """Return a batch with tokens as arrays: they are sent in a tenth of the bytes."""
    import numpy as np

    batches, encoder = _work
    return [
        replace(each, ids=np.asarray(each.ids, np.int32), trained=np.asarray(each.trained, bool))  # type: ignore[arg-type]
        for each in encoder.encode(batches[number].documents())
    ]
