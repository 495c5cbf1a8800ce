"""The assistant's turns in a text that a chat template rendered.

Two facts locate them. `Marks`: where each message's content lies, from a second rendering with marks in the messages, which must
give the same text but for the marks. `Layout`: what the template writes around an answer. A turn that both do not locate is
reported as `NotLocated`, and never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names of an answer's reasoning in its message."""

_THINK = re.compile(r"<think>\s*(?=[^\s<]|<(?!/think>))")
_THOUGHT = re.compile(r"</think>\s*(?=\S)")

Span = tuple[int, int]
Message = Mapping[str, Any]


class NotLocated(Exception):
    """The number of a message that cannot be located in the rendered text."""


@dataclass(frozen=True)
class Layout:
    """What a template writes around an answer."""

    prompt: str
    """The generation prompt; empty in a template without one."""
    header: str
    """From a user's content to the answer."""
    end: str
    """What ends an answer that a message follows."""
    tail: str
    """What ends the last answer."""
    tokens: tuple[str, ...]
    """The tokenizer's added tokens: markers of roles and ends."""


@dataclass(frozen=True)
class Marks:
    """Where messages' contents lie in a rendered text."""

    at: Mapping[int, Mapping[str, list[int]]]
    """Message → mark → positions. `s`: content, `r`: reasoning, `t`: content after </think>, `e`: the content's end."""
    all: bool
    """Whether all messages were marked, or the assistant's alone."""

    def start(self, index: int) -> int | None:
        """Return where the message begins, if each of its parts begins in one place."""
        places = [places for kind, places in self.at.get(index, {}).items() if kind != "e"]
        return min(map(min, places)) if places and all(len(each) == 1 for each in places) else None

    def end(self, index: int) -> int | None:
        places = self.at.get(index, {}).get("e", [])
        return places[0] if len(places) == 1 else None

    def next(self, index: int, end: int) -> int:
        """Return where a later message begins, of those that are known, or the text's end."""
        later = (kinds.values() for other, kinds in self.at.items() if other > index)
        return min((place for kinds in later for places in kinds for place in places), default=end)


def is_filled(message: Message, *names: str) -> bool:
    """Return whether any of these fields has text."""
    return any(isinstance(message.get(name), str) and message[name].strip() for name in names)


def _margins(text: str) -> tuple[str, str, str]:
    """Return the whitespace before, the content, and the whitespace after it."""
    before, core = text[: len(text) - len(text.lstrip())], text.strip()
    return before, core, text[len(before) + len(core) :]


def with_marks(message: Message, mark: str, kinds: str) -> Message:
    """Return a message with marks inside the whitespace around its texts, which a template may strip."""

    def put(kind: str) -> str:
        return mark.format(kind) if kind in kinds else ""

    result = dict(message)
    for name in ("content", *REASONING):
        if is_filled(message, name):
            before, core, after = _margins(message[name])
            if name == "content":
                core = _THINK.sub(lambda match: match[0] + put("r"), core)
                core = put("s") + _THOUGHT.sub(lambda match: match[0] + put("t"), core) + put("e")
            else:
                core = put("r") + core
            result[name] = before + core + after
    return result


def read_marks(marked: str, mark: str, text: str, all_marked: bool) -> Marks | None:
    """Take the marks out of a rendered text; None if the rest is not `text`."""
    first, *rest = re.split(f"{mark}([0-9]+)([a-z]){mark}", marked)
    at: dict[int, dict[str, list[int]]] = {}
    position, pieces = len(first), [first]
    for index, kind, piece in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        at.setdefault(int(index), {}).setdefault(kind, []).append(position)
        position += len(piece)
        pieces.append(piece)
    return Marks(at, all_marked) if "".join(pieces) == text else None


def dropped(messages: Sequence[Message], marks: Marks) -> Iterator[str]:
    """Yield remarks on what the template does not render: `reasoning`, `messages`."""
    for index, message in enumerate(messages):
        rendered = marks.at.get(index, {})
        if message.get("role") != "assistant":
            if marks.all and not rendered and is_filled(message, "content"):
                yield "messages"
        elif rendered and "r" not in rendered:
            if is_filled(message, *REASONING) or _THINK.search(str(message.get("content") or "")):
                yield "reasoning"


def turns(text: str, messages: Sequence[Message], marks: Marks, layout: Layout) -> dict[int, tuple[Span, bool]]:
    """Return each assistant turn's span, and whether what stands before it differs from the generation prompt.

    Raises:
        NotLocated: for a turn that is not rendered, or in a way that leaves its place open.
    """
    result: dict[int, tuple[Span, bool]] = {}
    low = 0
    for index, message in enumerate(messages):
        if message.get("role") == "assistant":
            bound = marks.next(index, len(text))
            start, differs = _start(text, index, message, marks, layout, low, bound)
            last = index == len(messages) - 1
            low = _end(text, start, bound, message, marks.end(index), layout, last)
            if low <= start:
                raise NotLocated(index)
            result[index] = (start, low), differs
        else:
            low = max(low, marks.end(index) or 0)
    return result


def _start(
    text: str, index: int, message: Message, marks: Marks, layout: Layout, low: int, bound: int
) -> tuple[int, bool]:
    """Return where a model would begin to write: after the generation prompt, else at the content."""
    first, end, prompt = marks.start(index), marks.end(index), layout.prompt
    if not is_filled(message, "content", *REASONING):  # calls of tools alone
        prompt = prompt or layout.header.rstrip(" ")
        at = text.find(prompt, low, bound) if prompt else -1
        if at < 0:
            raise NotLocated(index)
        return at + len(prompt), False
    limit = end if first is None else first
    if limit is None or limit < low:
        raise NotLocated(index)
    at = text.rfind(prompt, low, limit) if prompt else -1
    if at >= 0 and (first is not None or text.count(prompt, low, limit) == 1):
        return at + len(prompt), False
    if first is None:
        raise NotLocated(index)
    before, *_ = _margins(str(message.get("content") or ""))
    kept = text.endswith(layout.header[-3:] + before, low, first)  # a template may strip it
    return first - len(before) * kept, bool(prompt)


def _end(text: str, start: int, bound: int, message: Message, content: int | None, layout: Layout, last: bool) -> int:
    """Return where a turn ends, with its end token. -1: its place is open."""
    ends = [layout.tail, layout.end] if last else [layout.end]
    base = start if content is None else content
    if content is not None and not message.get("tool_calls"):
        *_, after = _margins(message["content"])
        gaps = ((gap + end) for end in ends for gap in (after, ""))
        if (gap := next((gap for gap in gaps if text.startswith(gap, base, bound)), None)) is not None:
            return base + len(gap)
    if last and layout.tail and text.endswith(layout.tail, base):
        return len(text)
    tokens = [end for end in ends if any(token in end for token in layout.tokens)]
    return max((at + len(end) for end in tokens if (at := text.rfind(end, base, bound)) >= 0), default=-1)
