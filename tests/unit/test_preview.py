"""`toolkit preview`: what a data set trains, before a run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import transformers
from programs import python

import toolkit as tk
from toolkit.cli import main
from toolkit.config.run_config import RunConfig
from toolkit.core.errors import DataError, ModelError, StrategyError
from toolkit.data import embedded_tokenizer, ingest
from toolkit.data.packing import Counts, pack_rows
from toolkit.data.tokenization import Encoded
from toolkit.data_preview import _halved
from toolkit.models.hf_loading import TOKENIZERS, load_tokenizer
from toolkit.models.resolution import embedded_config

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the embedded tokenizer, which takes a second to train."""
    path = tmp_path_factory.mktemp("tokenizer")
    embedded_tokenizer(path)
    return path


def test_preview(chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tk.preview("embedded", chats, chat_template=CHATML, seq_len=64)
    assert (result.format, result.counts["documents"], result.counts["complete"]) == ("messages", 4, True)
    assert [row["trained"] for row in result.rows] == [["import os<|im_end|>\n"]] * 4
    assert sum(result.lengths.values()) == 4
    assert "4 of 4 documents: no end token is trained" in result.warnings[1]
    assert "[import· os·<" in str(result)
    assert "<mark>import· os·&lt;" in result._repr_html_()
    assert 0 < result.counts["padding"] < 1
    both = tk.preview("embedded", chats, run_config=RunConfig(chat_template=CHATML, mask_prompts=False))
    assert both.counts["trained_tokens"] > result.counts["trained_tokens"]
    assert main(["preview", "embedded", str(chats), "--chat-template", _file(chats, CHATML), "--json", "-"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["rows"] == result.rows
    assert {"format", "counts", "rows"} <= written.keys()
    short = tk.preview("embedded", chats, chat_template=CHATML, seq_len=16, too_long="drop")
    assert "No row has a trained token" in short.warnings[-1]
    with pytest.raises(DataError, match="line 1: has messages, and the tokenizer"):
        tk.preview("embedded", chats)


def test_of_a_text_an_encoder_decoder_learns_the_second_halves() -> None:
    text = Encoded(ids=range(11), trained=[True] * 11)
    assert _halved(text, 4).trained == [False] * 4 + [True] * 4 + [False] * 2 + [True]
    rows = pack_rows([text], Counts(), kind="seq2seq", packed=False, seq_len=4, pad=0)
    assert [token for row in rows for token in row["labels"] if token >= 0] == [4, 5, 6, 7, 10]
    pair = Encoded(ids=[1, 2], trained=[False, True], atomic=True, split=1)
    assert _halved(pair, 4) is pair


def test_a_preview_takes_what_the_weights_say(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name}{n}"}) + "\n" for n in range(10)))
    result = tk.preview("embedded", f"{tmp_path / 'a.jsonl'},{tmp_path / 'b.jsonl'}:0.3")
    texts = sorted(row["trained"][0].removesuffix("<|eos|>") for row in result.rows)
    assert texts[:10] == [f"a{n}" for n in range(10)]
    mixed = ingest(f"{tmp_path / 'a.jsonl'},{tmp_path / 'b.jsonl'}:0.3")
    assert texts == sorted(each.content["text"] for batch in mixed.batches for each in batch.documents()), (
        "as a run has it"
    )


def _file(chats: Path, template: str) -> str:
    path = chats.with_name("template.jinja")
    path.write_text(template)
    return str(path)


def test_a_preview_reads_a_sample_and_imports_no_torch(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{n} ", "completion": "007"}) + "\n" for n in range(30_000)))
    config = {**embedded_config(), "max_position_embeddings": 4096}  # never described: the cache has no spec
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    code = (
        "import json, sys, toolkit as tk\n"
        f"print(json.dumps([tk.preview({str(tmp_path)!r}, {str(path)!r}).counts, 'torch' in sys.modules]))"
    )
    counts, torch = json.loads(python("-c", code, code=0).stdout)
    assert (counts["documents"], counts["complete"], torch) == (20_000, False, False)
    assert counts == tk.preview("embedded", path).counts, "that model is described"
    with pytest.raises(StrategyError, match="positions for 4096"):
        tk.preview(tmp_path, path, seq_len=4097)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_is_read_as_autotokenizer_reads_it(name: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    transformers.CONFIG_MAPPING[name]().save_pretrained(tmp_path)
    about = tmp_path / "tokenizer_config.json"
    fields = json.loads(about.read_text())
    for declared in {"PreTrainedTokenizerFast", TOKENIZERS[name] or "TokenizersBackend", "LlamaTokenizerFast"}:
        about.write_text(json.dumps({**fields, "tokenizer_class": declared}))
        mine = load_tokenizer(_with_source(tk.describe("embedded"), tmp_path, name))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert type(mine) is type(theirs)
        assert mine.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
        assert mine.init_kwargs.keys() == theirs.init_kwargs.keys()


def _with_source(spec: object, folder: Path, name: str) -> object:
    return dataclasses.replace(spec, source=str(folder), config={"model_type": name}, vocab=5_000)  # type: ignore[type-var]


def test_a_config_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(embedded_config()))
    with pytest.raises(ModelError, match=r"config without a tokenizer"):
        load_tokenizer(tk.describe(tmp_path / "config.json"))
