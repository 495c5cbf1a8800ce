"""A conversation → the text that the chat template renders, and the parts of it that are trained."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from toolkit.core.errors import DataError
from toolkit.models.chat_spans import (
    Layout,
    Marks,
    Messages,
    NotLocated,
    Span,
    dropped,
    read_marks,
    turns,
    unique_contents,
    with_marks,
)

REMARKS = {
    "reasoning": "the chat template drops reasoning, which is not trained",
    "messages": "the chat template leaves out messages that are not the assistant's",
    "answers": "the chat template leaves out texts of the assistant",
    "prompt": "the template's generation prompt differs from the text before an answer, which is trained as rendered",
    "end": "no end token is trained after the last answer, so nothing teaches the model to stop. Use --add-end-token",
    "open": "a message follows the last answer, and no end token stands between them, so none is trained",
    "bos": "the text begins with the token that the tokenizer adds, which stands there once",
    "joined": "the tokenizer has no chat template, so an answer follows its question with nothing between them",
}
"""What is worth a warning about a conversation. Each appears once for a data set, with the number of rows."""


def spell_remarks(remarks: Mapping[str, int], documents: int) -> list[str]:
    """Return a sentence for each kind of remark."""
    return [f"{count:,} of {documents:,} documents: {REMARKS[key]}." for key, count in remarks.items()]


_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A document as one text."""

    text: str
    where: str
    spans: Sequence[Span] | None = None
    """The trained characters, in order; None trains all."""
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
        weightless = [index for index, message in enumerate(content["messages"]) if message.get("weight") == 0]
        messages = [
            {name: value for name, value in message.items() if name != "weight" and value is not None}
            for message in content["messages"]
        ]
        tools = {"tools": content["tools"]} if content.get("tools") else {}
        text = self._render(messages, where, **tools)
        if not text:
            problem = "no token to train on, since the chat template renders nothing"
            raise DataError(f"{where}: {problem}. Give another with --chat-template FILE.")
        self._check_tools(text, messages, tools, where)
        unique = unique_contents(text, messages)
        marks = self._marks(text, messages, tools) if unique is None else unique
        if marks is not None and not marks and any(message.get("content") for message in messages):
            problem = "the chat template renders none of the texts"
            raise DataError(f"{where}: {problem}. Give another with --chat-template FILE.")
        remarks = set() if marks is None or unique else set(dropped(messages, marks))
        if not mask:
            if weightless:
                problem = f"message {weightless[0]} has weight 0, and --no-mask-prompts trains everything"
                raise DataError(f"{where}: {problem}. Leave one of them out.")
            return Rendered(text=text, where=where, remarks=sorted(remarks))
        answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        chosen = [index for index in answers[-last:] if index not in weightless]
        try:
            if self._marked:
                spans = self._generated(text, messages, tools, marks, end)
                if chosen != answers:
                    if len(spans) != len(answers):
                        raise NotLocated(f"{answers[0]} ({len(spans)} parts are marked of {len(answers)} answers)")
                    spans = [span for index, span in zip(answers, spans, strict=True) if index in chosen]
            else:
                located = dict(self._turns(text, messages, marks, tools)) if chosen else {}
                spans = [located[index][0] for index in chosen]
                remarks |= {"prompt"} if any(located[index][1] for index in chosen) else set()
        except NotLocated as error:
            raise DataError(
                f"{where}: message {error}: the assistant's turn cannot be located in what the chat template renders. Put"
                " {% generation %} and {% endgeneration %} around each in the template and give it as --chat-template"
                " FILE, or train on all tokens with --no-mask-prompts."
            ) from None
        opened = bool(spans) and not text[: spans[-1][1]].rstrip().endswith(self._added)
        closed = opened and end and chosen[-1:] == [len(messages) - 1]
        if opened and not closed:
            remarks.add("open" if any(index > chosen[-1] for index in marks or {}) else "end")
        return Rendered(text=text, spans=spans, where=where, closed=closed, remarks=sorted(remarks))

    def _render(self, messages: Messages, where: str, **options: Any) -> str:
        names = {name: any(name in message for message in (options, *messages)) for name in ("tools", "tool_calls")}
        if missing := [name for name, given in names.items() if given and name not in self.template]:
            problem = f"has {missing[0]!r}, which the chat template does not use"
            raise DataError(f"{where}: {problem}. Give one that does with --chat-template FILE, or remove the row.")
        try:
            return self._apply(_in_parts(messages) if self._takes_parts else list(messages), **options)
        except Exception as error:  # templates raise Jinja's errors, TypeError, their own raise_exception
            bare = any("function" not in tool for tool in options.get("tools", ()))
            cure = 'Write each tool as {"type": "function", "function": {…}}' if bare else "Change them"
            raise DataError(
                f"{where}: the chat template refuses these messages: {error}. {cure}, or give another with"
                " --chat-template FILE."
            ) from error

    def _apply(self, messages: Messages, **options: Any) -> str:
        # transformers copies each conversation into plain JSON first, which takes as long as this. Here all is plain JSON.
        from transformers.utils import chat_template_utils as upstream

        names = {**self._special, **options}
        if not hasattr(upstream, "_alias_reasoning_fields"):  # another version
            return str(upstream.render_jinja_template([messages], chat_template=self.template, **names)[0][0])
        chat = upstream._alias_reasoning_fields(messages)
        return str(upstream._compile_jinja_template(self.template).render(messages=chat, **names))

    @cached_property
    def _special(self) -> dict[str, Any]:
        """What a template may name beside the messages: special tokens, and what transformers gives each."""
        return {"tools": None, "documents": None, "add_generation_prompt": False, **self.tokenizer.special_tokens_map}

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template renders a content only if it is a list of parts."""
        messages, rendered = [{"role": "user", "content": "\U000f0000"}], {}
        for name, each in (("text", messages), ("parts", _in_parts(messages))):
            with contextlib.suppress(Exception):
                rendered[name] = messages[0]["content"] in self._apply(each)
        return rendered.get("parts", False) and not rendered.get("text", False)

    def _check_tools(self, text: str, messages: Messages, tools: Mapping[str, Any], where: str) -> None:
        """Refuse tools that change nothing in the text. The first row with tools answers for all."""
        if tools and "tools" not in self._known:
            self._known["tools"] = True
            with contextlib.suppress(DataError):
                self._known["tools"] = self._render(messages, where) != text
        if tools and not self._known["tools"]:
            problem = "has 'tools', which the chat template leaves out"
            raise DataError(f"{where}: {problem}. Give one that does not with --chat-template FILE, or remove the row.")

    @cached_property
    def _known(self) -> dict[str, Any]:
        """What is found once: whether tools are rendered, the layout with and without them, and what ends a call."""
        return {}

    def _marks(self, text: str, messages: Messages, tools: Mapping[str, Any]) -> Marks | None:
        """Return where contents lie in `text`; of the assistant's messages alone, if the template looks at the others."""
        mark = next(char for char in map(chr, range(0xF0000, 0xFFFFE)) if char not in text)
        for roles in (None, "assistant"):
            marked = [
                with_marks(message, f"{mark}{index}{{}}{mark}") if roles in (None, message.get("role")) else message
                for index, message in enumerate(messages)
            ]
            with contextlib.suppress(DataError):
                if (marks := read_marks(self._render(marked, "", **tools), mark, text)) is not None:
                    return marks
        return None

    @cached_property
    def _marked(self) -> bool:
        return bool(_GENERATION.search(self.template))

    @cached_property
    def _added(self) -> tuple[str, ...]:
        """The added tokens: markers of roles and ends."""
        tokens = map(str, (*self.tokenizer.added_tokens_decoder.values(), self.tokenizer.eos_token or ""))
        return tuple(sorted({token for token in tokens if token.strip()}))

    def _layout(self, tools: Mapping[str, Any]) -> Layout | None:
        """Return what the template writes around answers. Some templates render nothing without tools."""
        for options in ({}, tools):
            key = f"layout {bool(options)}"
            if key not in self._known:
                self._known[key] = None
                with contextlib.suppress(DataError, KeyError):
                    self._known[key] = self._find_layout(options)
        found: Layout | None = self._known["layout False"] or self._known[f"layout {bool(tools)}"]
        return found

    def _find_layout(self, tools: Mapping[str, Any]) -> Layout:
        """Read it from two turns of one letter each."""
        turn = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
        text = self._render(turn * 2, "", **tools)
        marks = self._marks(text, turn * 2, tools) or {}
        plain, prompted = (self._render(turn[:1], "", add_generation_prompt=flag, **tools) for flag in (False, True))
        question, answer, user, last = (marks[index]["s"] for index in range(4))
        between, header, after = text[answer + 1 : user], text[user + 1 : last], text[last + 1 :]
        prompt, asked = prompted[_common(plain, prompted) :], plain[question + 1 :]
        ends = header[: header.find(prompt)] if prompt in header else ""
        end = after if between.startswith(after) else self._whole(between, _common(between, after))
        if end != after and header.rstrip().endswith(after[len(end) :].rstrip()):
            # It asks for one more answer in any case. The marker of that role is no end.
            following = _common(between[::-1], text[:question][::-1])
            after = end = self._whole(between, min(len(end), self._next_border(between, len(between) - following)))
        elif not end and ends and between.startswith(ends) and any(token in ends for token in self._added):
            end = ends  # a question and an answer that a message follows end alike, the last answer does not
        if not prompt and header.startswith(asked) and not header[len(asked) :].strip():
            prompt = asked
        shorter = tuple(prompt[:at] for at in reversed(self._borders(prompt)) if at < len(prompt))
        return Layout(prompt, shorter, header, end, after, self._added)

    def _borders(self, text: str) -> list[int]:
        """Return where line breaks and added tokens end: markers begin alike."""
        return [match.end() for match in re.finditer("|".join(map(re.escape, (*self._added, "\n"))), text)]

    def _whole(self, text: str, limit: int) -> str:
        """Cut a text to at most `limit` characters, after a border."""
        return text[: max((at for at in self._borders(text) if at <= limit), default=0)]

    def _next_border(self, text: str, start: int) -> int:
        return min((at for at in self._borders(text) if at >= start), default=start)

    def _turns(
        self, text: str, messages: Messages, marks: Marks | None, tools: Mapping[str, Any]
    ) -> Iterator[tuple[int, tuple[Span, bool]]]:
        layout = self._layout(tools)
        if marks is None or layout is None:
            raise NotLocated(
                next(index for index, message in enumerate(messages) if message.get("role") == "assistant")
            )
        call = next((index for index, message in enumerate(messages) if message.get("tool_calls")), None)
        if call is not None and "call" not in self._known:
            self._known["call"] = {}
            with contextlib.suppress(DataError):
                ended = self._render(messages[: call + 1], "", **tools)
                self._known["call"] = self._around_call(ended, messages[call], layout)
        return turns(text, messages, marks, layout if call is None else replace(layout, **self._known["call"]))

    def _around_call(self, text: str, message: Mapping[str, Any], layout: Layout) -> dict[str, str]:
        """Return what a template writes around a call of tools that ends the text."""
        token = next((token for token in self._added if text.rstrip().endswith(token)), "")
        name = text.rfind(message["tool_calls"][0]["function"]["name"])
        known = next((each for each in (layout.prompt, *layout.shorter) if each and text.rfind(each, 0, name) >= 0), "")
        opener = text[text.rfind(known, 0, name) + len(known) : name] if known and not message.get("content") else ""
        return {"call": text[text.rindex(token) :] if token else "", "opener": opener}

    def _generated(
        self, text: str, messages: Messages, tools: Mapping[str, Any], marks: Marks | None, end: bool
    ) -> list[Span]:
        """Return what the template puts between {% generation %} and {% endgeneration %}."""
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {**self._special, **tools, "chat_template": self.template, "return_assistant_tokens_mask": True}
        _, (spans,) = render_jinja_template([messages], **options)
        for index, places in (marks or {}).items():  # in a macro, transformers counts from another place
            inside = any(first < places.get("e", 0) <= last for first, last in spans)
            if inside and messages[index].get("role") != "assistant":
                raise NotLocated(f"{index} ({messages[index].get('role')}) would be trained")
        layout = self._layout(tools) if end else None
        ends = [each.rstrip() for each in (layout.tail, layout.end) if each.strip()] if layout else []
        after = [next((len(each) for each in ends if text.startswith(each, last)), 0) for _, last in spans]
        return [(first, last + more) for (first, last), more in zip(spans, after, strict=True) if last > first]


def _in_parts(messages: Messages) -> list[dict[str, Any]]:
    """Return messages with each text as a list of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else dict(message)
        for message in messages
    ]


def _common(one: str, other: str) -> int:
    """Return the length of the common beginning."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
