"""`toolkit preview`: what a data set trains, before a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from programs import python

import toolkit as tk
from toolkit.cli import main
from toolkit.config.run_config import RunConfig
from toolkit.core.errors import DataError
from toolkit.data import embedded_tokenizer
from toolkit.models.hf_loading import GENERIC_TOKENIZERS, load_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [{"role": "user", "content": "import what?"}, {"role": "assistant", "content": "import os"}]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"messages": CHAT}) + "\n" for _ in range(4)))
    return path


def test_preview(chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tk.preview("embedded", chats, chat_template=CHATML, seq_len=64)
    assert (result.format, result.counts["documents"], result.counts["complete"]) == ("messages", 4, True)
    assert [row["trained"] for row in result.rows] == [["import os<|im_end|>\n"]] * 4
    assert sum(result.lengths.values()) == 4
    assert "4 of 4 documents: no end token is trained" in result.warnings[0]
    assert "[import· os·<" in str(result)
    assert "<mark>import· os·&lt;" in result._repr_html_()
    assert 0 < result.counts["padding"] < 1
    both = tk.preview("embedded", chats, run_config=RunConfig(chat_template=CHATML, mask_prompts=False))
    assert both.counts["trained_tokens"] > result.counts["trained_tokens"]
    assert main(["preview", "embedded", str(chats), "--chat-template", _file(chats, CHATML), "--json", "-"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["rows"] == result.rows
    assert {"format", "counts", "rows"} <= written.keys()
    with pytest.raises(DataError, match="line 1: has messages, and the tokenizer"):
        tk.preview("embedded", chats)


def _file(chats: Path, template: str) -> str:
    path = chats.with_name("template.jinja")
    path.write_text(template)
    return str(path)


def test_a_preview_reads_a_sample_and_imports_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{n} ", "completion": "007"}) + "\n" for n in range(30_000)))
    tk.preview("embedded", path)  # makes the embedded model
    code = (
        f"import sys, toolkit as tk\nresult = tk.preview('embedded', {str(path)!r})\n"
        "print(result.counts['documents'], result.counts['complete'], 'torch' in sys.modules)"
    )
    assert python("-c", code, code=0).stdout.split() == ["20000", "False", "False"]


@pytest.mark.parametrize("name", GENERIC_TOKENIZERS)
def test_the_generic_tokenizer_is_the_one_of_autotokenizer(name: str, tmp_path: Path) -> None:
    transformers.CONFIG_MAPPING[name]().save_pretrained(tmp_path)
    embedded_tokenizer(tmp_path)
    spec = tk.describe("embedded")
    mine = load_tokenizer(_with_source(spec, tmp_path, name))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert type(mine) is type(theirs)
    assert mine.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert mine.init_kwargs.keys() == theirs.init_kwargs.keys()


def _with_source(spec: object, folder: Path, name: str) -> object:
    import dataclasses

    return dataclasses.replace(spec, source=str(folder), config={"model_type": name})  # type: ignore[type-var]
