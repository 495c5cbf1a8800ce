"""What people bring: tables, JSON, archives and chats, as `documents` reads or refuses them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import toolkit.data as data
from toolkit.cli.parser import parse
from toolkit.core.errors import DataError
from toolkit.data import readers
from toolkit.data.files import Document, Findings, documents
from toolkit.data.formats import find_format


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def read(path: Path, **reading: Any) -> list[Document]:
    return list(documents(data.find_source(path), **reading))


def contents(path: Path, **reading: Any) -> list[Any]:
    """Texts; prompt and completion; or the turns as (role, content)."""
    return [simple(document) for document in read(path, **reading)]


def simple(document: Document) -> Any:
    if document.kind in ("messages", "turns"):
        return [(message["role"], message.get("content")) for message in document.content["messages"]]
    values = tuple(document.content.values())
    return values[0] if len(values) == 1 else values


def write(path: Path, content: Any) -> Path:
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


HEAD = "prompt,completion\n"

CSV: dict[str, tuple[Any, list[Any]]] = {
    "null words": (f'{HEAD}w3,NA\nw3,None\nw3,null\nw3,N/A\nw3,"NA"\n', [("w3", w) for w in ("NA", "None", "null", "N/A", "NA")]),
    "numbers": ("text\n4\n007\n1.50\nTrue\ninf\n", ["4", "007", "1.50", "True", "inf"]),
    "dates": ("text\n2024-01-02\n1e5\n0x1F\n", ["2024-01-02", "1e5", "0x1F"]),
    "semicolons": ("prompt;completion\na;b,c\n", [("a", "b,c")]),
    "tabs": ("prompt\tcompletion\na, b\tc\n", [("a, b", "c")]),
    "bars": ("prompt|completion\na|b\n", [("a", "b")]),
    "blanks in the header": ("prompt, completion \na, b\n", [("a", " b")]),
    "capitals": ("Prompt,Completion\na,b\n", [("a", "b")]),
    "other columns": ("id,prompt,x,completion\n1,a,,b\n", [("a", "b")]),
    "other columns twice": ("id,text,id\n1,a,2\n", ["a"]),
    "an index without a name": (",text\n0,a\n", ["a"]),
    "CRLF": ("prompt,completion\r\na,b\r\nc,d\r\n", [("a", "b"), ("c", "d")]),
    "BOM": (b"\xef\xbb\xbfprompt,completion\na,b\n", [("a", "b")]),
    "UTF-16": ("prompt,completion\na,\u00fc\n".encode("utf-16"), [("a", "\u00fc")]),
    "line breaks in cells": ('text\n"a\nb"\n"c\r\nd"\n', ["a\nb", "c\r\nd"]),
    "doubled quotes": ('text\n"say ""hi"", a"\n', ['say "hi", a']),
    "a quote inside": ('text\n5" disk\n', ['5" disk']),
    "blank lines": ("text\na\n\nb\n\n", ["a", "b"]),
    "no last line break": ("text\na", ["a"]),
    "unicode column": ("prompt,completion,\u8a9e\n\u8a9e,\u00e9,z\n", [("\u8a9e", "\u00e9")]),
    "JSON in a cell": (
        'messages\n"[{""role"": ""User"", ""content"": ""q""}, {""role"": ""model"", ""content"": ""a""}]"\n',
        [[("user", "q"), ("assistant", "a")]],
    ),
    "a quoted cell of a quoted word": ('text,other\n" ""hi""", "x\n', [' "hi"']),
    "blanks before a quote of another column": ('other,text\n "x",a\n', ["a"]),
    "Excel's delimiter and empty rows": ("sep=;\r\nprompt;completion\r\na;b\r\n;\r\n", [("a", "b")]),
    "JSON as a text": ('text\n"{""a"": 1}"\n', ['{"a": 1}']),
}  # fmt: skip


@pytest.mark.parametrize("name", CSV)
def test_csv(name: str, tmp_path: Path) -> None:
    content, expected = CSV[name]
    assert contents(write(tmp_path / "a.csv", content)) == expected


def test_a_csv_text_keeps_its_digits_after_many_rows(tmp_path: Path) -> None:
    rows = "".join(f"p{n},{'word' if n < 10_000 else '007'}\n" for n in range(15_000))
    pairs = contents(write(tmp_path / "a.csv", HEAD + rows))
    assert [completion for _, completion in pairs] == ["word"] * 10_000 + ["007"] * 5_000


REFUSED_CSV: dict[str, tuple[Any, str]] = {
    "cells more": (f"{HEAD}a,b,c\nd,e,f\n", r"a\.csv, line 2: 3 cells, expected 2 as in the header\. Put quotes"),
    "cells fewer": (f"{HEAD}a,b\nc\n", r"a\.csv, line 3: 1 cell, expected 2"),
    "after a cell of two lines": (f'{HEAD}a,"b\nb"\nc\n', r"line 4: 1 cell, expected 2"),
    "unquoted comma": ("text\nw3, w4\n", r"line 2: 2 cells, expected 1 .* Put quotes around a cell that contains ','"),
    "open quote": ('text\na\n"b\nc\n', r"line 3: a quote is not closed"),
    "open quote before another": (f'{HEAD}"a,b\n"c",d\n', r"line 2: malformed CSV: ',' expected after '\"'.*as \"\""),
    "backslash": ('text\n"say \\"hi\\""\n', r"line 2: malformed CSV.*write \" inside it as \"\""),
    "Latin-1": ("text\na\nf\u00fcr\n".encode("latin-1"), r"line 3: not UTF-8 at byte 8 of the file \(0xfc\).*iconv"),
    "Windows": ("text\n\u201chi\u201d\n".encode("cp1252"), r"line 2: not UTF-8 .*iconv -f WINDOWS-1252"),
    "after Excel's delimiter": (f"sep=,\n{HEAD}a,b\nc\n", r"line 4: 1 cell, expected 2"),
    "header alone": (HEAD, r"a\.csv: the file is empty, or a header alone"),
    "empty": ("", r"a\.csv: the file is empty"),
    "empty cell": (f"{HEAD}a,b\nc,\n", r"line 3: column 'completion' is empty"),
    "no header": ("a,b\nc,d\n", r"line 1: lacks the column 'text'\. It has 'a', 'b'.*--columns prompt="),
    "needed column twice": ("text,text\na,b\n", r"line 1: the column 'text' stands twice"),
    "repr": ("messages\n\"[{'role': 'user'}]\"\n", r"line 2: column 'messages' is a string that is not JSON.*json\.dumps"),
    "blanks before a quote": (f'{HEAD}"a", "b"\n', r"line 2: blanks before the quote of ' \"b\"'"),
    "carriage returns": ("text\ra\rb\r", r"line 1: a carriage return ends a line"),
    "UTF-16 without BOM": ("text\na\n".encode("utf-16-le"), r"binary file, or UTF-16 without a byte order mark"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_CSV)
def test_csv_refused(name: str, tmp_path: Path) -> None:
    content, expected = REFUSED_CSV[name]
    with pytest.raises(DataError, match=expected) as error:
        read(write(tmp_path / "a.csv", content))
    assert "network" not in str(error.value)


ROWS = [{"text": "a"}, {"text": "b"}]

JSON: dict[str, tuple[str, Any]] = {
    "an array": ("a.json", json.dumps(ROWS)),
    "a pretty-printed array": ("a.jsonl", json.dumps(ROWS, indent=2)),
    "lines in .json": ("a.json", ROWS),
    "one object with rows": ("a.json", json.dumps({"version": "1", "data": ROWS})),
    "pretty-printed objects": ("a.json", "\n".join(json.dumps(row, indent=1) for row in ROWS)),
    "CRLF and BOM": ("a.jsonl", b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n'),
    "UTF-16": ("a.jsonl", '{"text": "a"}\n{"text": "b"}\n'.encode("utf-16")),
    "blank lines": ("a.jsonl", '\n{"text": "a"}\n\n{"text": "b"}\n\n'),
    "huge numbers": ("a.jsonl", f'{{"text": "a", "id": {10**400}}}\n{{"id": 1e999, "text": "b"}}'),
    "NaN elsewhere": ("a.jsonl", '{"text": "a", "score": NaN}\n{"text": "b", "score": -Infinity}'),
    "other types elsewhere": ("a.jsonl", [{"text": "a", "id": 1, "x": None}, {"id": "2", "x": [1], "text": "b"}]),
}


@pytest.mark.parametrize("piece", [7, readers.READ_BYTES])
@pytest.mark.parametrize("name", JSON)
def test_json(name: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "READ_BYTES", piece)
    file, content = JSON[name]
    assert contents(write(tmp_path / file, content)) == ["a", "b"]


REFUSED_JSON = {
    "array without end": (
        '[\n{"text": "a"},\n{"text": "b"}\n',
        "line 3: malformed JSON: Expecting , or ] between rows, found nothing",
    ),
    "row without end": ('{"text": "a"}\n{"text": "b', "line 2: malformed JSON: Unterminated string"),
    "array with a hole": ('[{"text": "a"},]', "line 1: malformed JSON: Expecting , or ] between rows, found ,"),
    "more after the array": (
        '[{"text": "a"}]\n{"text": "b"}',
        "malformed JSON: Expecting , or ] between rows, found ]",
    ),
    "comma after a line": (
        '{"text": "a"},\n{"text": "b"},',
        "line 1: malformed JSON: Expecting nothing between rows, found ,",
    ),
    "NaN": ('{"text": NaN}', "line 1: column 'text' is nan, expected a string"),
    "list of texts": ('["a", "b"]', "line 1: the row is 'a'|the row is a string, expected an object"),
    "preferences": ('{"prompt": "p", "chosen": "c", "rejected": "r"}', "are preferences.*TRL's DPOTrainer"),
    "good and bad": (
        '{"prompt": "p", "completion": "c", "label": false}',
        "tell good answers from bad ones.*TRL's KTOTrainer",
    ),
    "Git LFS": ("version https://git-lfs.github.com/spec/v1\noid sha256:abc\n", "a pointer of Git LFS.*git lfs pull"),
    "empty array": ("[]", "the file is empty"),
    "other roles": ('{"messages": [{"role": 1, "content": "a"}]}', "message 0's 'role' is 1, expected a string"),
    "image": (
        '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}',
        "line 1: message 0 has a part of type 'image_url', expected text",
    ),
    "weight": ('{"messages": [{"role": "user", "content": "a", "weight": 0.5}]}', "'weight' is 0.5, expected 0"),
    "two systems": (
        '{"system": "x", "messages": [{"role": "system", "content": "y"}]}',
        "a system text in a column and another in its messages",
    ),
}


@pytest.mark.parametrize("piece", [7, readers.READ_BYTES])
@pytest.mark.parametrize("name", REFUSED_JSON)
def test_json_refused(name: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "READ_BYTES", piece)
    content, expected = REFUSED_JSON[name]
    with pytest.raises(DataError, match=expected):
        read(write(tmp_path / "a.jsonl", content))


CHAT = [("user", "q"), ("assistant", "a")]
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]

FORMATS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "alpaca": ({"instruction": "q", "input": "", "output": "a"}, CHAT, "format alpaca (instruction, output, input)"),
    "alpaca, input": ({"instruction": "q", "input": "x", "output": "a"}, [("user", "q\n\nx"), CHAT[1]], "format alpaca"),
    "alpaca, system": ({"system": "s", "instruction": "q", "output": "a"}, [("system", "s"), *CHAT], "format alpaca"),
    "alpaca, text": ({"instruction": "q", "output": "a", "text": "t"}, CHAT, "not used: text"),
    "sharegpt": ({"conversations": SHAREGPT}, CHAT, "format sharegpt (conversations)"),
    "sharegpt, system": (
        {"conversations": [{"from": "system", "value": "s"}, *SHAREGPT, {"from": "tool", "value": "{}"}]},
        [("system", "s"), *CHAT, ("tool", "{}")], "format sharegpt",
    ),
    "dialogue": ({"dialogue": TURNS}, CHAT, "format messages (dialogue)"),
    "JSON string": ({"messages": json.dumps(TURNS)}, CHAT, "format messages"),
    "roles": ({"messages": [{"role": "User", "content": "q"}, {"role": "bot", "content": "a"}]}, CHAT, "format messages"),
    "text parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, {**TURNS[1], "content": ["a"]}]},
        CHAT, "format messages",
    ),
    "lists": ({"prompt": TURNS[:1], "completion": TURNS[1:]}, CHAT, "format prompt-completion"),
    "a list and a text": ({"prompt": TURNS[:1], "completion": "a"}, CHAT, "format prompt-completion"),
    "prompt and response": ({"prompt": "q", "response": "a"}, ("q", "a"), "format prompt-response (prompt, response)"),
    "question and answer": ({"question": "q", "answer": "a", "id": 1}, CHAT, "format question-answer (question, answer); not"),
    "prompt and messages": ({"prompt": "q", "messages": TURNS}, CHAT, "format messages"),
    "system": ({"system": "s", "messages": TURNS}, [("system", "s"), *CHAT], "format messages (messages, system)"),
    "the same system": ({"system": "s", "messages": [{"role": "system", "content": "s"}]}, [("system", "s")], "format messages"),
    "capitals": ({"Messages": [{"Role": "User", "Content": "q"}, {"Role": "Assistant", "Content": "a"}]}, CHAT, "format messages"),
    "text for content": (
        {"messages": [{"role": "prompter", "text": "q"}, {"role": "assistant", "text": "a"}]}, CHAT, "format messages",
    ),
    "question with context": (
        {"question": "q", "context": "x", "answer": "a"}, [("user", "q\n\nx"), CHAT[1]], "format question-answer",
    ),
    "a blank input": ({"instruction": "q", "input": " ", "output": "a"}, CHAT, "format alpaca"),
    "history": (
        {"instruction": "q", "output": "a", "history": [["b", "c"], ["d", "e"]]},
        [("user", "b"), ("assistant", "c"), ("user", "d"), ("assistant", "e"), *CHAT],
        "format alpaca (instruction, output, history)",
    ),
    "OpenOrca": (
        {"system_prompt": "s", "question": "q", "response": "a"}, [("system", "s"), *CHAT],
        "format question-answer (question, response, system_prompt)",
    ),
    "prompt with tools": (
        {"prompt": "q", "response": "a", "tools": [{"name": "f"}]}, CHAT, "format prompt-response (prompt, response, tools)",
    ),
    "no tools": ({"messages": TURNS, "tools": "[]"}, CHAT, "format messages (messages, tools)"),
    "parts of responses": (
        {"messages": [{"role": "user", "content": [{"type": "input_text", "text": "q"}]}, TURNS[1]]}, CHAT, "format messages",
    ),
    "system in parts": (
        {"system": [{"type": "text", "text": "s"}], "messages": TURNS}, [("system", "s"), *CHAT], "format messages",
    ),
    "other fields of messages": (
        {"messages": [{**TURNS[0], "id": 7, "note": None}, TURNS[1]]}, CHAT, "not used in messages: id",
    ),
    "pandas' empty cells": (
        {"instruction": "q", "input": float("nan"), "output": "a", "system": float("nan")}, CHAT, "format alpaca",
    ),
    "a result in JSON": (
        {"messages": [*TURNS, {"role": "tool", "content": {"t": 20}}, {"role": "tool", "content": None}]},
        [*CHAT, ("tool", '{"t": 20}'), ("tool", "")], "format messages",
    ),
    "nulls": ({"system": None, "tools": None, "messages": [{**turn, "name": None} for turn in TURNS]}, CHAT, "format messages"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, tmp_path: Path) -> None:
    row, expected, note = FORMATS[name]
    findings = Findings()
    assert contents(write(tmp_path / "a.jsonl", [row]), findings=findings) == [expected]
    assert f"'{note}" in str(findings.formats) or f"; {note}" in str(findings.formats) or note in list(findings.formats)


def test_columns_that_the_user_names(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "q,a,text\nx,y,z\n")
    assert contents(path) == ["z"]
    assert contents(path, columns="prompt=q,completion=a") == [("x", "y")]
    assert contents(path, columns="question=q, answer=a") == [[("user", "x"), ("assistant", "y")]]
    assert contents(path, text_column="q") == contents(path, columns="text=q") == ["x"]
    for columns, expected in {
        "prompt=q": "--columns has more than the format text takes",
        "prompt=x,completion=a": "line 1: lacks the column 'x'",
        "promt=q": "'promt' is unknown. Did you mean 'prompt'",
        "prompt": "expected NAME=COLUMN",
    }.items():
        with pytest.raises(DataError, match=expected):
            read(path, columns=columns)
    pair = write(tmp_path / "c.jsonl", [{"prompt": "p", "completion": "c"}])
    assert contents(pair, text_column="completion") == contents(pair, columns="text=completion") == ["c"]
    plain = write(tmp_path / "d.txt", "a")
    for options in ({"data_format": "messages"}, {"columns": "prompt=q,completion=a"}):
        with pytest.raises(DataError, match=r"d\.txt: is text without columns"):
            read(plain, **options)
    both = write(tmp_path / "b.jsonl", [{"text": "t", "messages": TURNS}])
    assert contents(both) == [CHAT]
    assert contents(both, data_format="text") == ["t"]
    with pytest.raises(DataError, match="lacks the column 'instruction'"):
        read(both, data_format="alpaca")
    with pytest.raises(DataError, match=r"data_format 'alpca' is unknown. Did you mean 'alpaca'"):
        read(both, data_format="alpca")


def test_turns_are_a_conversation_or_a_prompt(tmp_path: Path) -> None:
    (document,) = read(write(tmp_path / "a.jsonl", [{"instruction": "q", "input": "x", "output": "a"}]))
    assert document.kind == "turns"
    assert document.resolve(chat=True).kind == "messages"
    assert document.resolve(chat=False).content == {"prompt": "q\n\nx", "completion": "a"}


CALL = {"name": "f", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])},
        {"role": "assistant", "content": "", "function_call": CALL},
        {"from": "function_call", "value": json.dumps(CALL)},
    ],
)
def test_tools(turn: dict[str, Any], tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    rows = [
        {"tools": tools, "messages": [TURNS[0], turn]} for tools in ([tool], json.dumps([tool]), [json.dumps(tool)])
    ]
    for document in read(write(tmp_path / "a.jsonl", rows)):
        assert document.content["tools"] == [tool]
        message = document.content["messages"][1]
        assert message["role"] == "assistant"
        assert not message.get("content")
        assert message["tool_calls"][0]["function"] == CALL


def test_weights_and_thoughts_are_kept(tmp_path: Path) -> None:
    assert [
        document.content["messages"][1]["weight"]
        for name in ("weight", "train", "training")
        for document in read(write(tmp_path / "c.jsonl", [{"messages": [TURNS[0], {**TURNS[1], name: False}]}]))
    ] == [0, 0, 0]
    turns = [TURNS[0], {**TURNS[1], "weight": 0}, TURNS[0], {**TURNS[1], "thinking": "hm"}]
    (document,) = read(write(tmp_path / "a.jsonl", [{"messages": turns}]))
    assert [message.get("weight") for message in document.content["messages"]] == [None, 0, None, None]
    assert document.content["messages"][3]["reasoning_content"] == document.content["messages"][3]["thinking"] == "hm"
    (pair,) = read(write(tmp_path / "b.jsonl", [{"prompt": [*TURNS, TURNS[0]], "completion": TURNS[1:]}]))
    assert [message.get("weight") for message in pair.content["messages"]] == [None, 0, None, None]


def test_unknown_roles_that_train_nothing(tmp_path: Path) -> None:
    row = {"messages": [{"role": "alice", "content": "q"}, {"role": "bob", "content": "a"}]}
    few = data.ingest(write(tmp_path / "few.jsonl", [row, {"messages": TURNS}, {"messages": TURNS}]))
    assert few.untrained == ""
    half = data.ingest(write(tmp_path / "half.jsonl", [row, {"messages": TURNS}]))
    assert half.untrained == "1 of 2 conversations have no trained turn of the assistant (roles: 'alice', 'bob' in 1)"
    assert data.ingest(tmp_path / "half.jsonl").untrained == half.untrained, "from the cache"


def test_a_folder_of_files_that_differ(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    pq.write_table(pa.table({"id": [1], "text": ["a"], "x": [None]}), folder / "a.parquet")
    pq.write_table(
        pa.table({"text": pa.array(["b"], pa.large_string()), "id": ["2"], "y": [1.5]}), folder / "b.parquet"
    )
    assert contents(folder) == ["a", "b"]
    pq.write_table(pa.table({"body": ["c"]}), folder / "c.parquet")
    with pytest.raises(DataError, match=r"c\.parquet: lacks the column 'text'\. It has 'body'"):
        read(folder)


def test_a_pattern_names_files(tmp_path: Path) -> None:
    for name in ("b/x", "a/y"):
        (tmp_path / name).parent.mkdir()
        write(tmp_path / f"{name}.jsonl", [{"text": name}])
    assert contents(tmp_path / "**" / "*.jsonl") == ["a/y", "b/x"]
    assert data.ingest(f"{tmp_path}/*/x.jsonl").notes.startswith("1 file (")
    with pytest.raises(DataError, match="no such file or folder"):
        read(tmp_path / "*.parquet")


def test_rows_are_found_in_a_file_without_a_telling_suffix(tmp_path: Path) -> None:
    for name in ("a", "a.txt", "a.jsonl.bak", "a.data"):
        assert contents(write(tmp_path / name, b"\xef\xbb\xbf" + json.dumps({"text": "b"}).encode())) == ["b"]
        assert contents(write(tmp_path / name, json.dumps({"text": "b"}).encode("utf-16"))) == ["b"]
        assert contents(write(tmp_path / name, "Prompt\tcompletion\na\tb\n".encode("utf-16"))) == [("a", "b")]
        for text in (
            '{"a": 1} is an object.\nb',
            '[{"a": 1}]\nb',
            "prompt, please\nb",
            "Input; output\nor not",
            "ID3 is a tag",
            "RIFF raff",
        ):
            assert contents(write(tmp_path / name, text)) == [text]
        assert contents(write(tmp_path / name, json.dumps([{"text": "b"}], indent=1))) == ["b"]
        assert contents(write(tmp_path / name, "{a: b}")) == ["{a: b}"]


def test_one_object_with_a_list_of_rows_is_a_whole_file(tmp_path: Path) -> None:
    """One row that holds a list is a row, as two are."""
    one = {"version": 1, "data": [{"text": "a"}, {"text": "b"}]}
    assert contents(write(tmp_path / "a.json", json.dumps(one))) == ["a", "b"]
    for name, content in {"a.jsonl": [one], "b.json": json.dumps([one])}.items():
        with pytest.raises(DataError, match=r"lacks the column 'text'\. It has 'version', 'data'"):
            read(write(tmp_path / name, content))
    assert contents(write(tmp_path / "c.json", json.dumps({"log": TURNS})), columns="messages=log") == [CHAT]


def test_empty_files_of_a_folder_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for name, content in {"a.csv": "text\na\n", "b.csv": "text\n", "c.jsonl": ""}.items():
        write(folder / name, content)
    findings = Findings()
    assert contents(folder, findings=findings) == ["a"]
    assert "2 empty files" in findings.formats
    (folder / "a.csv").unlink()
    with pytest.raises(DataError, match=r"b\.csv: the file is empty"):
        read(folder)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"text": "a"}\n\n\nERROR: x\n', r"line 4: malformed JSON: .* column 1 \(near 'ERROR"),
        ('{"text": "a"}\n\ufeff{"text": "b"}\n', "line 2: malformed JSON"),
        ([{"messages": [{"role": "user", "content": "q"}], "label": True}], "good answers from bad ones"),
        ([{"input": "q", "preferred_output": "a", "non_preferred_output": "b"}], "preferences"),
        ([{"tools": [{"name": "\ud800"}], "messages": TURNS}], "column 'tools' holds half of a surrogate pair"),
    ],
)
def test_rows_refused(content: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=expected):
        read(write(tmp_path / "a.jsonl", content))


ARRAYS: dict[str, Callable[[], Any]] = {
    "string": lambda: pa.array(["a", "b"]),
    "large": lambda: pa.array(["a", "b"], pa.large_string()),
    "dictionary": lambda: pa.array(["a", "b"]).dictionary_encode(),
    "view": lambda: pa.array(["a", "b"], pa.string_view()),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrow_and_parquet(name: str, tmp_path: Path) -> None:
    table = pa.table({" text": ARRAYS[name](), "other": [{"a": [1]}, None]})
    pq.write_table(table, tmp_path / "a.parquet")
    for file, make in {"file.arrow": pa.ipc.new_file, "stream.arrow": pa.ipc.new_stream}.items():
        with make(str(tmp_path / file), table.schema) as writer:
            writer.write_table(table)
        assert contents(tmp_path / file) == ["a", "b"]
    assert contents(tmp_path / "a.parquet") == ["a", "b"]


def test_conversations_in_parquet(tmp_path: Path) -> None:
    """The structs of parquet have all fields in all rows: a null is a field that was not there."""
    call = {**TURNS[1], "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1, "b": None}}}]}
    rows = [{"messages": TURNS}, {"messages": [TURNS[0], call]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    plain, called = read(tmp_path / "a.parquet")
    assert plain.content["messages"] == TURNS
    assert called.content["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert called.where == f"{tmp_path / 'a.parquet'}, row 2 (index 1)"


@pytest.mark.parametrize(
    ("column", "expected"),
    [(["a", None], r"row 2 \(index 1\): column 'text' is null"), ([1, 2], "row 1 .*: column 'text' is 1, expected a string"),
     ([["a"], ["b"]], "is a list, expected a string"), ([], "the file is empty")],
)  # fmt: skip
def test_parquet_refused(column: list[Any], expected: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=expected):
        read(tmp_path / "a.parquet")


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda raw: bytes(pa.compress(raw, codec="zstd", asbytes=True)),
}


@pytest.mark.parametrize("end", COMPRESSIONS)
def test_compressed(end: str, tmp_path: Path) -> None:
    for name, raw in {
        "a.jsonl": '{"text": "a"}\n',
        "a.json": '[{"text": "a"}]',
        "a.csv": "text\na\n",
        "a.txt": "a",
    }.items():
        packed = COMPRESSIONS[end](raw.encode())
        assert contents(write(tmp_path / f"{name}{end}", packed)) == ["a"]
        assert contents(write(tmp_path / name, packed)) == ["a"], "found by content"
    big = COMPRESSIONS[end](b'{"text": "' + bytes(range(97, 123)) * 5000 + b'"}\n')
    with pytest.raises(DataError, match=rf"b\.jsonl{end}: is damaged or incomplete: .*Download or write it again"):
        read(write(tmp_path / f"b.jsonl{end}", big[: len(big) // 2]))
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / f"a.jsonl{end}", COMPRESSIONS[end](b'{"text": "a"}'))
    assert contents(tmp_path / "folder") == ["a"]
    parts = b"".join(map(COMPRESSIONS[end], (b'{"text": "a"}\n', b'{"text": "b"}\n')))
    assert contents(write(tmp_path / f"c.jsonl{end}", parts)) == ["a", "b"], "a file of two compressed parts"


def archive(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        for name in names:
            packed.writestr(name, "x")
    return file.getvalue()


def tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as packed:
        packed.addfile(tarfile.TarInfo("a.txt"))
    return file.getvalue()


BINARY: dict[str, tuple[bytes, str]] = {
    "a.zip": (archive("a.jsonl"), r"is a zip archive.*unzip"),
    "a.jsonl": (archive("a.jsonl"), r"is a zip archive.*unzip"),
    "a.tar": (tar(), r"is a tar archive.*tar -xf"),
    "a.tar.gz": (gzip.compress(tar()), r"is a tar archive.*tar -xf"),
    "a.docx": (archive("[Content_Types].xml", "word/document.xml"), r"word processor.*Save it as text"),
    "a.xlsx": (archive("[Content_Types].xml", "xl/workbook.xml"), r"Excel workbook.*CSV"),
    "a.pdf": (b"%PDF-1.7\n\0", r"is a PDF.*pdftotext"),
    "a.npy": (b"\x93NUMPY\x01\0", r"array of NumPy.*JSONL"),
    "a.npz": (archive("a.npy"), r"array of NumPy"),
    "a.pt": (archive("a/data.pkl"), r"PyTorch file or pickle"),
    "a.pkl": (b"\x80\x04\x95", r"PyTorch file or pickle"),
    "a.parquet": (b"text\na\n", r"is not the parquet file that its name says"),
    "b.parquet": (b"PAR1text", r"is damaged or incomplete"),
    "c.parquet": (gzip.compress(b"PAR1text"), r"a parquet file inside gzip. Decompress"),
    "a.bin": (b"abc\0\x01", r"is a binary file"),
}


@pytest.mark.parametrize("name", BINARY)
def test_what_is_no_text(name: str, tmp_path: Path) -> None:
    content, expected = BINARY[name]
    with pytest.raises(DataError, match=expected) as error:
        read(write(tmp_path / name, content))
    assert "iconv" not in str(error.value)


def test_sources_with_weights(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [{"text": f"a{n}"} for n in range(100)])
    second = write(tmp_path / "b.csv", "text\n" + "".join(f"b{n}\n" for n in range(100)))

    def rows(weights: str, seed: int = 0) -> tuple[list[str], Any]:
        mixed = data.ingest(weights, seed=seed)
        return [each.content["text"] for batch in mixed.batches for each in batch.documents()], mixed

    texts, mixed = rows(f"{first},{second}:0.3")
    assert texts[:100] == [f"a{n}" for n in range(100)]
    assert len(set(texts[100:])) == len(texts[100:]) == 30
    assert rows(f"{first},{second}:0.3")[0] == texts
    assert rows(f"{first},{second}:0.3", seed=1)[0] != texts
    assert "30 of 100 rows" in mixed.notes
    twice, _ = rows(f"{first}:2.5")
    assert sorted(twice).count("a0") in (2, 3)
    assert len(twice) == 250
    assert next(mixed.batches[1].documents()).where.startswith(f"{second}, line ")
    write(tmp_path / "c,d.jsonl", [{"text": "x"}])
    assert data.ingest(tmp_path / "c,d.jsonl").batches[0].source.files == (tmp_path / "c,d.jsonl",)
    with pytest.raises(DataError, match="a weight of 0"):
        data.ingest(f"{first}:0")
    with pytest.raises(DataError, match=r"a weight of 0\.001 takes none of 100 rows"):
        data.ingest(f"{first}:0.001")


def test_several_data_flags_are_one_value() -> None:
    flags = parse(["train", "--data", "a.jsonl", "--data", "b.parquet:0.3", "--data-format", "alpaca"])
    assert (flags.data, flags.data_format) == ("a.jsonl,b.parquet:0.3", "alpaca")


def test_conversations_without_an_assistant_are_refused_where_prompts_are_masked(tmp_path: Path) -> None:
    class Tokenizer:
        eos_token_id = pad_token_id = 1

    path = write(tmp_path / "a.jsonl", [{"messages": [{"role": "alice", "content": "q"}]}])
    spec: Any = SimpleNamespace(
        max_positions=None, architecture="LlamaForCausalLM", kind="causal", config={}, name="tiny"
    )
    with pytest.raises(
        DataError, match=r"no trained turn .*roles: 'alice' in 1.*Name its roles 'user' and 'assistant'"
    ):
        data.prepare_data(path, Tokenizer(), spec, seq_len=8, packing=False)


USER = {"role": "user", "content": "q"}


def called(arguments: object) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("message", "right"),
    [
        ({"role": "assistant", "reasoning": "r", "content": "4"}, {"reasoning_content": "r", "content": "4"}),
        ({"text": "raw", "role": "assistant", "content": "edited"}, {"content": "edited"}),
        ({"role": "assistant", "content": None, "text": "x"}, {"content": "x"}),
        ({"from": "gpt", "function_call": {"name": "f", "parameters": {"x": 1}}}, called({"x": 1})),
        ({"from": "gpt", "function_call": {"name": "f", "arguments": "{}"}}, called({})),
        ({"from": "gpt", "function_call": {"name": "f", "arguments": "{ }"}}, called({})),
        ({"from": "gpt", "function_call": {"name": "f"}}, called({})),
        ({"from": "Function_Call", "value": '{"name": "f", "arguments": {"x": 1}}'}, called({"x": 1})),
        ({"from": "function_call", "value": '[{"name": "f"}]'}, called({})),
    ],
)
def test_a_message_is_what_its_fields_say(message: dict[str, Any], right: dict[str, Any]) -> None:
    form = find_format(["messages"], "auto", {})
    kind, content = form.document({"messages": [USER, message]})
    (_, answer) = content["messages"]
    assert (kind, answer["role"]) == ("messages", "assistant")
    assert {name: answer[name] for name in right} == right


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        (["instruction", "output"], {"instruction": "q", "output": "a", "system_prompt": "Be brief"}),
        (["prompt", "response", "system"], {"prompt": "q", "response": "a", "system": "Be brief"}),
    ],
)
def test_a_system_text_of_any_row_is_kept(columns: list[str], row: dict[str, Any]) -> None:
    kind, content = find_format(columns, "auto", {}).document(row)
    assert kind == "turns"
    assert content["messages"][0] == {"role": "system", "content": "Be brief"}
