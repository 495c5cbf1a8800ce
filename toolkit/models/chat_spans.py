"""The assistant's turns in a text that a chat template rendered.

Two facts locate them. Marks: where each message's texts lie. Long texts that stand in it once are found there, others by a
second rendering with marks in the messages, which must give the same text but for the marks. `Layout`: what the template writes
around an answer. A turn that both do not locate is `NotLocated`, and never guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names of an answer's reasoning in its message."""

UNIQUE = 20
"""Characters from which on a content that stands in a text once is the message's, and not the template's."""

_TEXT_FIELDS = {"content", *REASONING}
_THINK = re.compile(r"<think>\s*(?=[^\s<]|<(?!/think>))")
_THOUGHT = re.compile(r"(?s).*</think>\s*(?=\S)")  # up to the last one

Span: TypeAlias = tuple[int, int]
Messages: TypeAlias = Sequence[Mapping[str, Any]]
Marks: TypeAlias = dict[int, dict[str, int]]
"""Message → mark → position, or -1 for a text that is rendered twice.

`s`: the content begins, `r`: its reasoning, `t`: what follows </think>, `e`: the content ends.
"""


class NotLocated(Exception):
    """The number of a message that cannot be located in the rendered text, and why, where that is known."""


@dataclass(frozen=True)
class Layout:
    """What a template writes around an answer."""

    prompt: str
    """The generation prompt. In a template without one: what follows a question, if that stands right before the answer."""
    shorter: tuple[str, ...]
    """Beginnings of the prompt up to a line break or an added token, the longest first: without <think>."""
    header: str
    """From a user's content to the answer."""
    end: str
    """What ends an answer that a message follows."""
    tail: str
    """What ends the last answer."""
    tokens: tuple[str, ...]
    """The tokenizer's added tokens: markers of roles and ends."""
    call: str = ""
    """What ends a call of tools."""
    opener: str = ""
    """From the start of a turn that calls a tool to the tool's name."""


def unique_contents(text: str, messages: Messages) -> Marks | None:
    """Return the marks of contents that are long and stand in `text` once, one after the other; None for any others."""
    marks: Marks = {}
    end = 0
    for index, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, str) or "think>" in content or message.keys() - {"role", "content"}:
            return None
        core = content.strip()
        start = text.find(core, end)
        if len(core) < UNIQUE or start < 0 or text.find(core) != text.rfind(core):
            return None
        end = start + len(core)
        marks[index] = {"s": start, "e": end}
    return marks


def with_marks(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """Return a message with marks inside the whitespace around its texts, which a template may strip."""
    result = dict(message)
    for name in message.keys() & _TEXT_FIELDS:
        if text := _text(message, name):
            before, core, after = _margins(text)
            if name == "content":
                if "think>" in core:
                    core = _THINK.sub(lambda match: match[0] + mark.format("r"), core, count=1)
                    core = _THOUGHT.sub(lambda match: match[0] + mark.format("t"), core, count=1)
                if not core.endswith("</think>"):  # a template may ask whether anything follows
                    core += mark.format("e")
            result[name] = before + mark.format("s" if name == "content" else "r") + core + after
    return result


def read_marks(marked: str, mark: str, text: str) -> Marks | None:
    """Take the marks out of a rendered text; None if the rest is not `text`."""
    first, *rest = re.split(f"{mark}([0-9]+)([a-z]){mark}", marked)
    marks: Marks = {}
    position = len(first)
    for index, kind, piece in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        places = marks.setdefault(int(index), {})
        places[kind] = -1 if kind in places else position
        position += len(piece)
    return marks if first + "".join(rest[2::3]) == text else None


def dropped(messages: Messages, marks: Marks) -> Iterator[str]:
    """Yield remarks on what the template does not render: `reasoning`, `messages`."""
    answers = {index for index, message in enumerate(messages) if message.get("role") == "assistant"}
    if any("r" not in marks.get(index, {}) and _reasons(messages[index]) for index in answers):
        yield "reasoning"
    if any(_visible(messages[index]) for index in answers - marks.keys()):
        yield "answers"
    others = {index for index, message in enumerate(messages) if _text(message, "content")} - answers
    if others & marks.keys() and others - marks.keys():
        yield "messages"


def turns(text: str, messages: Messages, marks: Marks, layout: Layout) -> Iterator[tuple[int, tuple[Span, bool]]]:
    """Yield each assistant turn's message and span, and whether it stands behind something else than the generation prompt.

    Raises:
        NotLocated: for a turn that is not rendered, or in a way that leaves its place open.
    """
    low = 0
    for index, message in enumerate(messages):
        if message.get("role") == "assistant":
            later = [marks[other].values() for other in marks if other > index]
            bound = min((place for places in later for place in places if place >= low), default=len(text))
            start, differs = _start(text, index, message, marks.get(index, {}), layout, low, bound)
            end = marks.get(index, {}).get("e")
            low = _end(text, start, bound, message, end, layout, index == len(messages) - 1, index)
            if low < start:
                raise NotLocated(index)
            yield index, ((start, low), differs)
        else:
            low = max(low, marks.get(index, {}).get("e", 0))


def _start(
    text: str, index: int, message: Mapping[str, Any], places: dict[str, int], layout: Layout, low: int, bound: int
) -> tuple[int, bool]:
    """Return where a model would begin to write: after the generation prompt, else at the content."""
    first, prompt = min(places.values(), default=-1), layout.prompt
    prompts = [each for each in (prompt, *layout.shorter) if each]
    if not places and message.get("tool_calls"):  # nothing else is rendered
        if _visible(message):
            raise NotLocated(f"{index} (its content is left out beside its calls of tools)")
        name = text.find(message["tool_calls"][0]["function"]["name"], low, bound)
        for known in (*prompts, layout.header.rstrip(" ")):
            if known and (at := text.rfind(known, low, name)) >= 0:
                return at + len(known), known != prompt and bool(prompt)
        if not (layout.opener and text.endswith(layout.opener, low, name)):
            raise NotLocated(index)
        return name - len(layout.opener), False
    if not places and not any(_text(message, name) for name in _TEXT_FIELDS):  # an empty answer
        known = prompt or layout.header.rstrip(" ")
        if not known or (at := text.find(known, low, bound)) < 0:
            raise NotLocated(index)
        return at + len(known), False
    if first < low:
        raise NotLocated(index)
    for more in (0, len(prompt) - 1):  # the content may begin with the end of the prompt: <think>
        if prompt and (at := text.rfind(prompt, low, first + more)) >= 0:
            return at + len(prompt), False
    for known in prompts[1:]:
        if (at := text.rfind(known, low, first)) >= 0 and not text[at + len(known) : first].strip():
            return at + len(known), True
    content = str(message.get("content") or "")
    before, *_ = _margins(content if "s" in places else content.rpartition("</think>")[2])
    kept = text.endswith(layout.header[-3:] + before, low, first)  # a template may strip it
    return first - len(before) * kept, bool(prompt)


def _end(
    text: str,
    start: int,
    bound: int,
    message: Mapping[str, Any],
    content: int | None,
    layout: Layout,
    last: bool,
    index: int,
) -> int:
    """Return where a turn ends, with its end token. -1: its place is open."""
    ends = [layout.tail, layout.end] if last else [layout.end]
    base = start if content is None else content
    if calls := message.get("tool_calls"):
        base = _calls_end(text, base, bound, calls, index)
        found = [(at, -len(end)) for end in (layout.call, *ends) if end and (at := text.find(end, base, bound)) >= 0]
        return min(found)[0] - min(found)[1] if found else -1
    *_, after = _margins(str(message.get("content") or ""))
    for known in (gap + end for end in ends for gap in (after, "")):
        if text.startswith(known, base, bound):
            return base + len(known)
    if last and layout.tail and text.endswith(layout.tail, base):
        return len(text)
    marked = [end for end in ends if any(token in end for token in layout.tokens)]
    return max((at + len(end) for end in marked if (at := text.rfind(end, base, bound)) >= 0), default=-1)


def _calls_end(text: str, start: int, bound: int, calls: Sequence[Mapping[str, Any]], index: int) -> int:
    """Return a place behind the names and arguments of all calls.

    Raises:
        NotLocated: for a call that is not rendered whole.
    """
    end = at = start
    for call in calls:
        name = call["function"]["name"]
        at = text.find(name, end, bound)
        places = [_find_value(text, leaf, at, bound) for leaf in _leaves(call["function"]["arguments"])]
        if at < 0 or min(places, default=0) < 0:
            raise NotLocated(f"{index} (a call of {name} is left out)")
        end = max([at + len(name), *places])
    return end


def _leaves(value: Any) -> Iterator[str | int]:
    """Yield the texts and whole numbers in arguments: others may be written in several ways."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    elif isinstance(value, str | int) and not isinstance(value, bool):
        yield value


def _find_value(text: str, value: str | int, start: int, bound: int) -> int:
    """Return where a value ends, as it is or as JSON writes it; -1 where it is not."""
    spellings = (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]) if isinstance(value, str) else ()
    for spelled in (*spellings, str(value)):
        if (at := text.find(spelled, start, bound)) >= 0:
            return at + len(spelled)
    return -1


def _visible(message: Mapping[str, Any]) -> str:
    """Return a message's content behind its reasoning, if it has more than whitespace."""
    return _text(message, "content").rpartition("</think>")[2].strip()


def _text(message: Mapping[str, Any], name: str) -> str:
    """Return a field of a message if it is a text with more than whitespace."""
    text = message.get(name)
    return text if isinstance(text, str) and text.strip() else ""


def _reasons(message: Mapping[str, Any]) -> bool:
    content = _text(message, "content")
    return ("think>" in content and bool(_THINK.search(content))) or any(_text(message, name) for name in REASONING)


def _margins(text: str) -> tuple[str, str, str]:
    """Return the whitespace before, the content, and the whitespace after it."""
    core = text.strip()
    if len(core) == len(text):
        return "", text, ""
    before = text[: len(text) - len(text.lstrip())]
    return before, core, text[len(before) + len(core) :]
