"""A conversation → the text that the chat template renders, and the parts of it that are trained."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from toolkit.core.errors import DataError
from toolkit.data.chat_spans import Layout, Marks, Message, NotLocated, Span, dropped, read_marks, turns, with_marks

REMARKS = {
    "reasoning": "the chat template drops reasoning, which is not trained",
    "messages": "the chat template leaves out messages that are not the assistant's",
    "prompt": "the template's generation prompt differs from the text before an answer, which is trained as rendered",
    "end": "no end token is trained after the last answer, so nothing teaches the model to stop. Use --add-end-token",
}
"""What is worth a warning about a conversation. Each appears once for a data set, with the number of rows."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A document as one text."""

    text: str
    spans: Sequence[Span] | None
    """The trained characters, in order; None trains all."""
    where: str
    atomic: bool = True
    closed: bool = False
    """Whether the end-of-sequence token follows the text."""
    remarks: Sequence[str] = ()
    """Keys of `REMARKS`."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with its tokenizer."""

    tokenizer: Any
    template: str

    def conversation(self, content: Mapping[str, Any], where: str, *, mask: bool, last: bool, end: bool) -> Rendered:
        """Return a conversation as text, with the spans of its assistant turns, each up to and with its end token.

        Args:
            content: `messages`, and `tools` where there are any.
            where: file and line.
            mask: train on the assistant's turns alone.
            last: train on the last of them alone.
            end: train the end tokens that follow answers in the text, and add one after the last answer without any.

        Raises:
            DataError: where the template refuses the messages, or a turn cannot be located in its text.
        """
        messages = [
            {name: value for name, value in message.items() if name != "weight" and value is not None}
            for message in content["messages"]
        ]
        options = self._options(content, messages, where)
        text = self._render(messages, where, **options)
        if not text:
            problem = "no token to train on, since the chat template renders nothing"
            raise DataError(f"{where}: {problem}. Give another with --chat-template FILE.")
        marks = self._marks(text, messages, options)
        remarks = set(dropped(messages, marks)) if marks else set()
        weightless = [index for index, message in enumerate(content["messages"]) if message.get("weight") == 0]
        if not mask:
            if weightless:
                problem = f"message {weightless[0]} has weight 0, and --no-mask-prompts trains everything"
                raise DataError(f"{where}: {problem}. Leave one of them out.")
            return Rendered(text=text, spans=None, where=where, remarks=sorted(remarks))
        answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        chosen = [index for index in answers[-last:] if index not in weightless]
        if _GENERATION.search(self.template):
            spans = self._generated(text, messages, where, options, marks, end)
            spans = spans if chosen == answers else _of_answers(spans, answers, chosen, where)
        else:
            located = self._located(text, messages, where, marks) if chosen else {}
            spans = [located[index][0] for index in chosen]
            remarks |= {"prompt"} if any(located[index][1] for index in chosen) else set()
        opened = bool(spans) and not text[: spans[-1][1]].rstrip().endswith(self._added)
        closed = opened and end and chosen[-1:] == [len(messages) - 1]
        remarks |= {"end"} if opened and not closed else set()
        return Rendered(text=text, spans=spans, where=where, closed=closed, remarks=sorted(remarks))

    def _render(self, messages: Sequence[Message], where: str, **options: Any) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), chat_template=self.template, tokenize=False, **options
            )
            return text
        except Exception as error:  # templates raise Jinja's errors, TypeError, their own raise_exception
            raise DataError(
                f"{where}: the chat template refuses these messages: {error}. Change them, or give another with"
                " --chat-template FILE."
            ) from error

    def _options(self, content: Mapping[str, Any], messages: Sequence[Message], where: str) -> dict[str, Any]:
        """Return the tools for the template. One that does not know them would drop them."""
        tools = content.get("tools")
        fields = {"tools": tools, "tool_calls": any(message.get("tool_calls") for message in messages)}
        if missing := [name for name, value in fields.items() if value and name not in self.template]:
            raise DataError(
                f"{where}: has {missing[0]!r}, which the chat template does not use. Give one that does with"
                " --chat-template FILE, or remove the row."
            )
        return {"tools": tools} if tools else {}

    def _marks(self, text: str, messages: Sequence[Message], options: Mapping[str, Any]) -> Marks | None:
        """Return where contents lie in `text`. Fewer marks where a template looks at a content's first characters."""
        mark = next(char for char in map(chr, range(0xF0000, 0xFFFFE)) if char not in text)
        for roles, kinds in ((None, "srte"), ("assistant", "srte"), ("assistant", "e")):
            marked = [
                with_marks(message, f"{mark}{index}{{}}{mark}", kinds)
                if roles in (None, message.get("role"))
                else message
                for index, message in enumerate(messages)
            ]
            try:
                marks = read_marks(self._render(marked, "", **options), mark, text, roles is None)
            except DataError:
                continue
            if marks is not None:
                return marks
        return None

    @cached_property
    def _added(self) -> tuple[str, ...]:
        """The added tokens: markers of roles and ends."""
        tokens = map(str, (*self.tokenizer.added_tokens_decoder.values(), self.tokenizer.eos_token or ""))
        return tuple(sorted({token for token in tokens if token.strip()}))

    @cached_property
    def _layout(self) -> Layout | None:
        """What the template writes around answers, from two turns of one letter each."""
        turn = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
        try:
            text = self._render(turn * 2, "")
            marks = self._marks(text, turn * 2, {})
            plain, prompted = (self._render(turn[:1], "", add_generation_prompt=flag) for flag in (False, True))
        except DataError:
            return None
        places = [marks and (marks.end(index) if ends else marks.start(index)) for index, ends in _PLACES]
        if None in places:
            return None
        answer, user, last, tail = places
        between, header, after = text[answer:user], text[user:last][1:], text[tail:]
        end = after if between.startswith(after) else self._whole(between[: _common(between, after)])
        if after != end and header.endswith(after[len(end) :]):  # it asks for one more answer in any case
            after = end
        return Layout(prompted[_common(plain, prompted) :], header, end, after, self._added)

    def _whole(self, common: str) -> str:
        """Cut the common beginning of two texts back to a line break or a whole token: markers begin alike."""
        matches = re.finditer("|".join(map(re.escape, (*self._added, "\n"))), common)
        return common[: max((match.end() for match in matches), default=0)]

    def _located(
        self, text: str, messages: Sequence[Message], where: str, marks: Marks | None
    ) -> dict[int, tuple[Span, bool]]:
        try:
            if marks is None or self._layout is None:
                raise NotLocated(next(i for i, message in enumerate(messages) if message.get("role") == "assistant"))
            return turns(text, messages, marks, self._layout)
        except NotLocated as error:
            raise DataError(
                f"{where}: message {error}: the assistant's turn cannot be located in what the chat template renders. Put"
                " {% generation %} and {% endgeneration %} around answers in the template and give it as --chat-template"
                " FILE, or train on all tokens with --no-mask-prompts."
            ) from None

    def _generated(
        self,
        text: str,
        messages: Sequence[Message],
        where: str,
        options: Mapping[str, Any],
        marks: Marks | None,
        end: bool,
    ) -> list[Span]:
        """Return what the template puts between {% generation %} and {% endgeneration %}."""
        from transformers.utils.chat_template_utils import render_jinja_template

        (again,), (spans,) = render_jinja_template(
            conversations=[messages],
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **options},
        )
        for index, message in enumerate(messages) if marks else ():
            inside = marks and (marks.end(index) or 0) - 1
            other = message.get("role") != "assistant" and any(first <= inside < last for first, last in spans)
            if other or again != text:
                raise DataError(
                    f"{where}: message {index} ({message.get('role')}) would be trained as the assistant's. Correct"
                    " {% generation %} in the chat template."
                )
        if end and (layout := self._layout):
            ends = [each.rstrip() for each in (layout.tail, layout.end) if each.rstrip().endswith(self._added)]
            after = ((next((len(each) for each in ends if text.startswith(each, last)), 0)) for _, last in spans)
            spans = [(first, last + more) for (first, last), more in zip(spans, after, strict=True)]
        return [(first, last) for first, last in spans if last > first]


_PLACES = ((1, True), (2, False), (3, False), (3, True))
"""Of the layout's four messages: the end of the first answer, the begin of the second question and answer, its end."""


def _common(one: str, other: str) -> int:
    """Return the length of the common beginning."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _of_answers(spans: list[Span], answers: list[int], chosen: list[int], where: str) -> list[Span]:
    """Return the spans of the chosen answers."""
    if len(spans) != len(answers):
        raise DataError(
            f"{where}: the chat template marks {len(spans)} parts of {len(answers)} assistant turns with"
            " {% generation %}, so single turns cannot be told apart. Use --train-on all-turns, and no weight."
        )
    return [span for index, span in zip(answers, spans, strict=True) if index in chosen]
