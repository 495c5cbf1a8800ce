"""Rows → documents: one table of the columns, roles and fields that people use."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.core.errors import DataError, nearest
from toolkit.data.messages import check, read_messages, read_text, read_tools

SYSTEM = {"system?": "system system_prompt", "tools?": "tools functions"}

FORMATS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "prompt-completion": ("prompt", {"prompt": "prompt", "completion": "completion", **SYSTEM}),
    "prompt-response": ("prompt", {"prompt": "prompt", "completion": "response", **SYSTEM}),
    "messages": ("messages", {"messages": "messages conversation dialogue dialog chat turns", **SYSTEM}),
    "sharegpt": ("messages", {"messages": "conversations", **SYSTEM}),
    "alpaca": ("turns", {"prompt": "instruction", "completion": "output", "input?": "input", "history?": "history", **SYSTEM}),
    "dolly": ("turns", {"prompt": "instruction", "completion": "response", "input?": "context", **SYSTEM}),
    "question-answer": ("turns", {"prompt": "question", "completion": "answer response", "input?": "context", **SYSTEM}),
    "query-response": ("turns", {"prompt": "query", "completion": "response", **SYSTEM}),
    "problem-solution": ("turns", {"prompt": "problem", "completion": "solution", **SYSTEM}),
    "input-output": ("turns", {"prompt": "input", "completion": "output", **SYSTEM}),
    "text": ("text", {"text": "text"}),
}  # fmt: skip
"""Format → the kind of its documents, and field → its columns; with `?` it may be missing. The first complete one counts."""

COLUMNS = sorted({name for _, fields in FORMATS.values() for columns in fields.values() for name in columns.split()})
"""Names of columns, which `--columns` gives to others."""

PREFERENCES = ({"chosen", "rejected"}, {"preferred_output", "non_preferred_output"})
RATED = {"completion", "response", "messages", "conversations"}
"""Columns of preferences, and of answers that a `label` may call good or bad."""

TURN = ("user", "assistant")


@dataclass(frozen=True, kw_only=True)
class Format:
    """How the rows of a table become documents."""

    name: str
    kind: str
    columns: Mapping[str, str]
    """Field → its column in the table."""
    unused: dict[str, None] = dataclasses.field(default_factory=dict)
    """Fields of messages that were left out; of all rows until now."""

    def document(self, row: Any) -> tuple[str, dict[str, Any]]:
        """Return a row's kind and content, as `files.Document` has them.

        Raises:
            DataError: without the row's place.
        """
        values: dict[str, Any] = {}
        for field, column in self.columns.items():
            if column not in check(row, dict, "the row") and field[-1] != "?":
                raise missing_column(column, row)
            spelled = FORMATS[self.name][1][field].split()
            if field[-1] == "?" and column in spelled:  # rows may spell an optional field in several ways
                column = next((each for each in spelled if row.get(each)), column)
            value, what = row.get(column), f"column {column!r}"
            if field[-1] == "?" and (not value or value != value or str(value).isspace()):  # NaN is pandas' empty cell
                continue
            if field == "messages" or (self.kind == "prompt" and field[-1] != "?" and isinstance(value, list)):
                value = read_messages(value, what, self.unused)
            elif field == "history?":
                pairs = [check(pair, list, "a pair of 'history'") for pair in check(value, list, what)]
                value = read_messages(
                    [{"role": role, "content": text} for pair in pairs for role, text in zip(TURN, pair, strict=False)],
                    what,
                    self.unused,
                )
            elif field == "tools?":
                value = read_tools(value, what)
            else:
                value = check(read_text(value, what) if field == "system?" else value, str, what)
            values[field.strip("?")] = value
        texts = all(isinstance(values.get(name, ""), str) for name in ("prompt", "completion"))
        if self.kind == "text" or (self.kind == "prompt" and texts and values.keys() == {"prompt", "completion"}):
            return self.kind, values
        if self.kind != "messages":
            prompt, answer = values["prompt"], values["completion"]
            text = f"{prompt}\n\n{values['input']}" if values.get("input") else prompt
            before = prompt if isinstance(prompt, list) else [{"role": "user", "content": text}]
            after = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
            before = [turn | {"weight": 0} if turn["role"] == "assistant" else turn for turn in before]
            values["messages"] = [*values.get("history", ()), *before, *after]
        system, first = values.get("system"), values["messages"][0]
        if system and first["role"] != "system":
            values["messages"].insert(0, {"role": "system", "content": system})
        elif system and first.get("content") != system:
            raise DataError("has a system text in a column and another in its messages. Keep one of them.")
        content = {name: values[name] for name in ("messages", "tools") if values.get(name)}
        single = self.kind != "messages" and texts and not values.keys() & {"tools", "history"}
        return "turns" if single else "messages", content


def find_format(columns: Sequence[str], data_format: str, renamed: Mapping[str, str]) -> Format:
    """Return the format of a table with these columns.

    Args:
        columns: the table's.
        data_format: a name in `FORMATS`, or `auto`.
        renamed: name in `COLUMNS` → the column that has its meaning.

    Raises:
        DataError: for a column that is missing or stands twice, and for rows that are not trained on; without a place.
    """
    if unknown := next((name for name in renamed if name not in COLUMNS), None):
        raise DataError(f"--columns: {unknown!r} is unknown.{nearest(unknown, COLUMNS)} Known: {', '.join(COLUMNS)}.")
    if missing := next((column for column in renamed.values() if column not in columns), None):
        raise missing_column(missing, columns)
    names = {column.strip().casefold(): column for column in reversed(columns)}
    names |= {column.strip(): column for column in columns} | dict(renamed)
    if any(pair <= names.keys() for pair in PREFERENCES) and data_format == "auto" and not renamed:
        raise DataError(
            "rows with a chosen and a rejected answer are preferences, which need another loss. Use TRL's DPOTrainer, or train on"
            " the chosen answers alone: --columns completion=chosen (conversations: --columns messages=chosen)."
        )
    if "label" in names and names.keys() & RATED and data_format == "auto" and not renamed:
        raise DataError(
            "rows with an answer and its 'label' tell good answers from bad ones, which needs another loss. Use TRL's KTOTrainer,"
            " keep the good rows alone, or train on all of them: --data-format prompt-completion (or messages, sharegpt)."
        )
    # Rows of JSON may have an optional field that the first one lacks.
    fits = {
        name: {f: next((names[c] for c in w.split() if c in names), w.split()[0] * ("?" in f)) for f, w in fields.items()}
        for name, (_, fields) in FORMATS.items() if data_format in ("auto", name)
    }  # fmt: skip

    def given(name: str) -> int:
        """Return how many of the renamed columns the format takes."""
        return len(renamed.keys() & {word for words in FORMATS[name][1].values() for word in words.split()})

    name = max(fits, key=lambda name: (all(fits[name].values()), given(name)))
    if not all(fits[name].values()):
        name = max(fits, key=lambda name: (len(set(columns) & set(fits[name].values())), name == "text"))
        raise missing_column(
            next(FORMATS[name][1][f].split()[0] for f, column in fits[name].items() if not column), columns
        )
    if given(name) < len(renamed):
        raise DataError(
            f"--columns has more than the format {name} takes: {', '.join(fits[name])}. Name all, or fewer."
        )
    if twice := next((column for column in fits[name].values() if columns.count(column) > 1), None):
        raise DataError(f"the column {twice!r} stands twice. Rename one of them.")
    return Format(name=name, kind=FORMATS[name][0], columns=fits[name])


def missing_column(name: str, columns: Iterable[str]) -> DataError:
    """Return the error for a table or row without a column."""
    return DataError(
        f"lacks the column {name!r}. It has {', '.join(map(repr, columns))}; expected 'text', 'prompt' and 'completion',"
        " 'messages', or columns of another --data-format. Name them: --columns prompt=question,completion=answer, or"
        " --text-column NAME."
    )
