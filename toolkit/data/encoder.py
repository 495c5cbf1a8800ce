"""A document → token ids, and which of them are trained."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from toolkit.core.atomic_io import expand_user
from toolkit.core.errors import DataError
from toolkit.data.files import Document

BATCH = 64
"""Texts that are given to the tokenizer at once: it works on them in parallel."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A document's tokens."""

    ids: Sequence[int]
    trained: Sequence[bool]
    """Whether the model learns to predict this token. Same length as `ids`."""
    whole: bool
    """A prompt or conversation, which is never cut in two; a text may be."""
    split: int
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
            DataError: for messages without a chat template, or one that cannot tell the assistant's turns.
        """
        for kind, alike in groupby(documents, lambda document: document.kind):
            while some := list(islice(alike, BATCH)):
                if kind == "text":
                    yield from self._texts(some)
                elif kind == "prompt":
                    yield from self._prompts(some)
                else:
                    yield from map(self._messages, some)

    def _ids(self, texts: list[str], special: bool = True) -> list[list[int]]:
        # verbose=False: a warning about texts over the model's length means nothing here, since they are cut into rows.
        options = {"add_special_tokens": special, "return_attention_mask": False, "verbose": False}
        ids: list[list[int]] = self.tokenizer(texts, **options)["input_ids"]
        return ids

    def _with_eos(self, ids: list[int]) -> list[int]:
        return ids if ids and ids[-1] == self.eos else [*ids, self.eos]

    def _texts(self, documents: list[Document]) -> Iterator[Encoded]:
        for ids in self._ids([document.content["text"] for document in documents]):
            closed = self._with_eos(ids)
            yield Encoded(ids=closed, trained=[True] * len(closed), whole=False, split=0)

    def _prompts(self, documents: list[Document]) -> Iterator[Encoded]:
        prompts = self._ids([document.content["prompt"] for document in documents])
        completions = self._ids([document.content["completion"] for document in documents], special=False)
        for prompt, completion in zip(prompts, map(self._with_eos, completions), strict=True):
            # Some tokenizers close every text. An encoder wants that; between prompt and completion it would be an end
            # in the middle.
            if not self.seq2seq and prompt and prompt[-1] == self.eos:
                prompt = prompt[:-1]
            trained = [not self.mask_prompts] * len(prompt) + [True] * len(completion)
            yield Encoded(ids=prompt + completion, trained=trained, whole=True, split=len(prompt))

    def _messages(self, document: Document) -> Encoded:
        if self.seq2seq:
            raise DataError(
                f"{document.where}: messages train a causal model, and this one is an encoder-decoder. Use prompt and"
                " completion."
            )
        template = chat_template_of(self.tokenizer, self.template, document.where)
        messages = document.content["messages"]
        marked = self.mask_prompts and _GENERATION.search(template) is not None
        shaped = self._shaped(messages, template, document.where, return_assistant_tokens_mask=marked)
        ids = list(shaped["input_ids"])
        if marked:
            trained = [bool(flag) for flag in shaped["assistant_masks"]]
            self._check_marks(messages, template, shaped, document.where)
        elif self.mask_prompts:
            trained = self._turns(messages, ids, template, document.where)
        else:
            trained = [True] * len(ids)
        return Encoded(ids=ids, trained=trained, whole=True, split=0)

    def _check_marks(self, messages: list[dict[str, str]], template: str, shaped: Any, where: str) -> None:
        """Refuse a mask that covers what others say.

        transformers marks everything to the end where a marked part ends in a character that became no token
        (`apply_chat_template`, `end_token`), as whitespace does with some tokenizers.
        """
        text = self.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        trained = {token for token, flag in enumerate(shaped["assistant_masks"]) if flag}
        end = 0
        for index, message in enumerate(messages):
            content = message["content"].strip()
            if (start := text.find(content, end)) < 0:
                continue  # the template writes it in another way
            end = start + len(content)
            tokens = {shaped.char_to_token(at) for at in range(start, end)}
            if message["role"] != "assistant" and tokens & trained:
                raise DataError(
                    f"{where}: message {index} ({message['role']}) would be trained as the assistant's: with this"
                    " tokenizer the end of {% generation %} is lost. Move {% endgeneration %} in the chat template to"
                    " before the whitespace that it follows."
                )

    def _turns(self, messages: list[dict[str, str]], ids: list[int], template: str, where: str) -> list[bool]:
        """Return which tokens are the assistant's: those that a turn adds to the conversation, without its header."""
        trained = [False] * len(ids)
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = messages[:index]
            before = self._shaped(prompt, template, where, add_generation_prompt=True)["input_ids"] if prompt else []
            after = self._shaped(messages[: index + 1], template, where)["input_ids"]
            if after[: len(before)] != before or ids[: len(after)] != after:
                raise DataError(
                    f"{where}: message {index}: the chat template writes earlier turns differently once later ones"
                    " follow, so the assistant's tokens cannot be told apart. Put {% generation %} and"
                    " {% endgeneration %} around them in the template and give it as --chat-template FILE, or train on"
                    " all tokens with --no-mask-prompts."
                )
            trained[len(before) : len(after)] = [True] * (len(after) - len(before))
        return trained

    def _shaped(self, messages: list[dict[str, str]], template: str, where: str, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=True, return_dict=True, **options
            )
        except (
            Exception
        ) as error:  # templates raise what they like: Jinja's errors, TypeError, their own raise_exception
            raise DataError(
                f"{where}: the chat template refuses these messages: {error}. Change them, or give another with"
                " --chat-template FILE."
            ) from error


def chat_template_of(tokenizer: Any, template: str | None, where: str) -> str:
    """Return the template's text.

    Raises:
        DataError: for a tokenizer that has none, when none is given.
    """
    if template is not None:
        return template
    if not tokenizer.chat_template:
        raise DataError(
            f"{where}: has messages, and the tokenizer {tokenizer.name_or_path or 'of this model'} has no chat"
            " template. Give one with --chat-template FILE (a Jinja template), or use prompt and completion."
        )
    return str(tokenizer.get_chat_template())


def read_template(template: str | Path | None) -> str | None:
    """Return a chat template's text, from a file or the text itself (which contains a brace).

    Raises:
        DataError: for a file that cannot be read.
    """
    if template is None or "{" in str(template):
        return None if template is None else str(template)
    try:
        return expand_user(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DataError(
            f"chat template {template}: cannot be read: {why}. Give a file with a Jinja template."
        ) from error
