"""Documents → token ids, and which of them are trained; of many documents in several processes."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from toolkit.core.atomic_io import LIMIT, expand_user, read_limited
from toolkit.core.display import progress_bar
from toolkit.core.errors import DataError
from toolkit.core.process_lifecycle import begin_child, hold_signals
from toolkit.data.files import Document
from toolkit.data.ingestion import Contents, cached_documents

BATCH = 64
"""Texts that are given to the tokenizer at once: it works on them in parallel."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A document's tokens."""

    ids: Sequence[int]
    trained: Sequence[bool]
    """Whether the model learns to predict this token. Same length as `ids`."""
    atomic: bool = False
    """A prompt or conversation, which is never cut in two; a text may be."""
    split: int = 0
    """The start of the completion, which an encoder-decoder model's decoder sees. 0 in a text."""


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A tokenizer, and how it is used here."""

    tokenizer: Any
    eos: int
    mask_prompts: bool
    template: str | None
    """The chat template's text; None uses the tokenizer's own."""
    seq2seq: bool = False

    def encode(self, documents: Iterable[Document]) -> Iterator[Encoded]:
        """Encode documents in order; the end-of-sequence token closes a text and a completion.

        A conversation is what the chat template makes of it, nothing added. Prompt and completion are encoded apart, so
        that a prompt is the same tokens here and in generation.

        Raises:
            DataError: for messages without a chat template, or one that does not mark the assistant's turns.
        """
        chat = not self.seq2seq and bool(self.template or self.tokenizer.chat_template)
        for kind, alike in groupby((document.resolve(chat) for document in documents), lambda each: each.kind):
            while some := list(islice(alike, BATCH)):
                if kind == "messages":
                    yield from map(self._conversation, some)
                else:
                    yield from self._texts(some) if kind == "text" else self._prompts(some)

    def _ids(self, documents: list[Document], name: str, special: bool = True) -> list[list[int]]:
        # verbose=False: a warning about texts over the model's length means nothing here, since they are cut into rows.
        options = {"add_special_tokens": special, "return_attention_mask": False, "verbose": False}
        ids: list[list[int]] = self.tokenizer([document.content[name] for document in documents], **options)[
            "input_ids"
        ]
        return ids

    def _with_eos(self, ids: list[int]) -> list[int]:
        return ids if ids and ids[-1] == self.eos else [*ids, self.eos]

    def _texts(self, documents: list[Document]) -> Iterator[Encoded]:
        for ids in map(self._with_eos, self._ids(documents, "text")):
            yield Encoded(ids=ids, trained=[True] * len(ids))

    def _prompts(self, documents: list[Document]) -> Iterator[Encoded]:
        completions = map(self._with_eos, self._ids(documents, "completion", special=False))
        for prompt, completion in zip(self._ids(documents, "prompt"), completions, strict=True):
            # Some tokenizers close every text. An encoder needs that; between prompt and completion it would end the
            # document in the middle.
            if not self.seq2seq and prompt and prompt[-1] == self.eos:
                prompt = prompt[:-1]
            trained = [not self.mask_prompts] * len(prompt) + [True] * len(completion)
            yield Encoded(ids=prompt + completion, trained=trained, atomic=True, split=len(prompt))

    def _conversation(self, document: Document) -> Encoded:
        if self.seq2seq:
            raise DataError(
                f"{document.where}: messages train a causal model, and this one is an encoder-decoder. Use prompt and"
                " completion."
            )
        template = self.template or (self.tokenizer.chat_template and str(self.tokenizer.get_chat_template()))
        if not template:
            raise DataError(
                f"{document.where}: has messages, and the tokenizer {self.tokenizer.name_or_path} has no chat template."
                " Give one with --chat-template FILE (a Jinja template), or use prompt and completion."
            )
        apply = partial(self._apply, template, document.where)
        messages = [{k: v for k, v in message.items() if k != "weight"} for message in document.content["messages"]]
        marked = self.mask_prompts and _GENERATION.search(template) is not None
        tokens = apply(messages, return_dict=True, return_assistant_tokens_mask=marked)
        if not tokens["input_ids"]:
            problem = "no token to train on, since the chat template renders nothing"
            raise DataError(f"{document.where}: {problem}. Give another with --chat-template FILE.")
        trained = [not self.mask_prompts] * len(tokens["input_ids"])
        if marked:
            trained = [bool(flag) for flag in tokens["assistant_masks"]]
            _check_marks(messages, apply(messages, tokenize=False), tokens, document.where)
        elif self.mask_prompts:
            for start, end in _turns(messages, tokens["input_ids"], apply, document.where):
                trained[start:end] = [True] * (end - start)
        return Encoded(ids=list(tokens["input_ids"]), trained=trained, atomic=True)

    def _apply(self, template: str, where: str, messages: list[dict[str, str]], **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, chat_template=template, **options)
        except Exception as error:  # templates raise Jinja's errors, TypeError, their own raise_exception
            raise DataError(
                f"{where}: the chat template refuses these messages: {error}. Change them, or give another with"
                " --chat-template FILE."
            ) from error


def _check_marks(messages: list[dict[str, str]], text: str, tokens: Any, where: str) -> None:
    """Refuse a mask that covers messages of others.

    transformers marks everything to the end where a marked part ends in a character that became no token
    (`apply_chat_template`, `end_token`), as whitespace does with some tokenizers.
    """
    end = 0
    for index, message in enumerate(messages):
        content = message["content"].strip()
        if (start := text.find(content, end)) < 0:
            continue  # the template writes it in another way
        end = start + len(content)
        own = {tokens.char_to_token(at) for at in range(start, end)} - {None}
        if message["role"] != "assistant" and any(tokens["assistant_masks"][token] for token in own):
            raise DataError(
                f"{where}: message {index} ({message['role']}) would be trained as the assistant's: with this tokenizer"
                " the end of {% generation %} is lost. Move {% endgeneration %} in the chat template to before the"
                " whitespace that it follows."
            )


def _turns(
    messages: list[dict[str, str]], ids: list[int], apply: Callable[..., list[int]], where: str
) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the assistant's tokens: those that a turn adds to the conversation, without its header."""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = apply(messages[:index], return_dict=False, add_generation_prompt=True) if index else []
        after = apply(messages[: index + 1], return_dict=False)
        if after[: len(before)] != before or ids[: len(after)] != after:
            raise DataError(
                f"{where}: message {index}: the chat template writes earlier turns differently once later ones follow,"
                " so the assistant's tokens cannot be told apart. Put {% generation %} and {% endgeneration %} around"
                " them in the template and give it as --chat-template FILE, or train on all tokens with"
                " --no-mask-prompts."
            )
        yield len(before), len(after)


def read_template(template: str | Path | None) -> str | None:
    """Return a chat template's text, from a file or the text itself (which contains a brace).

    Raises:
        DataError: for a file that cannot be read or is empty.
    """
    if template is None or "{" in str(template):
        return None if template is None else str(template)
    try:
        text = read_limited(expand_user(template), LIMIT).decode()
        if not text.strip():
            raise ValueError("it is empty")
        return text
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(
            f"chat template {template}: cannot be read: {why}. Give a UTF-8 file with a Jinja template."
        ) from error


# All documents of a source ----------------------------------------------------------------------------------------------

PROCESS_BYTES = 32 << 20
"""Bytes of documents for each process: fewer cost less time than another process."""

_work: tuple[Contents, Encoder]
"""The documents and the encoder of a worker process; set as it starts."""


def tokenize(contents: Contents, encoder: Encoder) -> Iterator[Encoded]:
    """Yield the documents' tokens in order.

    Raises:
        DataError: as `Encoder.encode`, and for a process that was killed.
    """
    import pyarrow as pa

    size = contents.documents.stat().st_size
    processes = min(_cores(), size // PROCESS_BYTES)
    with pa.memory_map(str(contents.documents)) as file, progress_bar("tokenizing", size, "B") as bar:
        reader = pa.ipc.open_file(file)
        sizes = (reader.get_batch(number).nbytes for number in range(reader.num_record_batches))
        batches: Iterator[Iterable[Encoded]] = (
            _by_processes(contents, encoder, processes, reader.num_record_batches)
            if processes > 1
            else (encoder.encode(cached_documents(contents, number)) for number in range(reader.num_record_batches))
        )
        for nbytes, batch in zip(sizes, batches, strict=True):
            yield from batch
            bar.update(nbytes)


def _by_processes(contents: Contents, encoder: Encoder, processes: int, count: int) -> Iterator[list[Encoded]]:
    """Yield batches in order; at most two for each process are encoded ahead."""
    others = multiprocessing.active_children()
    ahead: deque[Future[list[Encoded]]] = deque()
    fork = multiprocessing.get_context("fork")
    work = (os.getpid(), contents, encoder)
    pool = ProcessPoolExecutor(processes, mp_context=fork, initializer=_start, initargs=work)
    try:
        for number in range(count):
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


def _start(parent: int, contents: Contents, encoder: Encoder) -> None:
    global _work
    begin_child(parent)
    _work = contents, encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of the tokenizer do not survive a fork


def _encode(number: int) -> list[Encoded]:
    """Return a batch with tokens as arrays: they are sent in a tenth of the bytes."""
    import numpy as np

    contents, encoder = _work
    return [
        Encoded(
            ids=np.asarray(document.ids, np.int32),  # type: ignore[arg-type]
            trained=np.asarray(document.trained, bool),  # type: ignore[arg-type]
            atomic=document.atomic,
            split=document.split,
        )
        for document in encoder.encode(cached_documents(contents, number))
    ]


def _cores() -> int:
    return len(os.sched_getaffinity(0))
