"""`toolkit.data`: from a file to what a rank's forward takes, with real tokenizers, models and files."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from programs import environment, python
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import modeling_flash_attention_utils as flash

import toolkit.data as data
from toolkit.config.train_config import TrainConfig
from toolkit.core.errors import DataError, StrategyError
from toolkit.data import ingestion, tokenization
from toolkit.data import rows as rows_module
from toolkit.data.packing import IGNORED, Counts, pack_rows
from toolkit.data.tokenization import Encoded, Encoder
from toolkit.models import ModelSpec, varlen

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\n"
    "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "import what?"},
    {"role": "assistant", "content": "import os"},
    {"role": "user", "content": "and then?"},
    {"role": "assistant", "content": "return 0"},
]


def spec_of(config: Any, kind: str = "causal") -> ModelSpec:
    """Of a spec, what data look at."""
    return ModelSpec(
        name="tiny", source=None, architecture=config.architectures[0], kind=kind, config=config.to_dict(),
        parameters=(), tied=(), linears=(), blocks=(), attentions=(), layers=2, hidden=32, heads=4,
        vocab=config.vocab_size, max_positions=None,
    )  # fmt: skip


def tiny(name: str, **more: Any) -> Any:
    """A config of 2 layers, with its class's name in `architectures`."""
    config = transformers.CONFIG_MAPPING[name]
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 32, "vocab_size": 4096, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    names = {"gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 4096, "n_positions": 64}}
    built = config(**{key: value for key, value in {**names.get(name, sizes), **more}.items() if value is not None})
    architecture = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name)
    built.architectures = [architecture or "T5ForConditionalGeneration"]
    return built


def build(config: Any, attention: str = "sdpa") -> Any:
    """The model, with weights large enough that attention matters."""
    torch.manual_seed(0)
    model = getattr(transformers, config.architectures[0])._from_config(config, attn_implementation=attention)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.config.use_cache = False
    return model.eval()


LLAMA = tiny("llama")
LLAMA_SPEC = spec_of(LLAMA)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    data.embedded_tokenizer(folder)
    return folder


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "accelerate-toolkit" / "data"


def jsonl(path: Path, *rows: Any) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


# ---- the embedded text and its tokenizer


def test_embedded_text_is_the_standard_library_in_order() -> None:
    files = data.embedded_files()
    assert files == data.embedded_files()
    size = sum(path.stat().st_size for path in files)
    assert 4_000_000 <= size < 4_500_000
    assert not {"test", "tests", "site-packages", "idlelib", "lib2to3"} & {
        part for path in files for part in path.parts
    }
    first = next(iter(data.documents(data.find_source("embedded"))))
    assert first.content["text"] == files[0].read_text(encoding="utf-8")


def test_embedded_tokenizer_is_the_same_to_the_byte(tokenizer_folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    code = (
        f"from pathlib import Path; import toolkit.data as d; d.embedded_tokenizer(Path({str(tmp_path / 'again')!r}))"
    )
    environ = environment(PYTHONHASHSEED="7", RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    python("-c", code, env=environ, code=0)
    names = sorted(path.name for path in tokenizer_folder.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    for name in names:
        assert (tokenizer_folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert len(tokenizer) == 4096
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    text = "def f(ü, 语):\n\treturn None  # 🙂\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


# ---- sources, and what is wrong with them


def texts(source: Path | str) -> list[dict[str, Any]]:
    return [dict(document.content) for document in data.documents(data.find_source(source))]


def test_sources(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("bé", encoding="utf-8-sig")
    (folder / "sub" / "a.md").write_text("deep", encoding="utf-8")
    (folder / "image.png").write_bytes(b"\x89PNG")
    (folder / ".hidden.txt").write_text("no", encoding="utf-8")
    jsonl(folder / "a.jsonl", {"text": "one", "more": 1}, {"text": "two"})
    assert texts(folder) == [{"text": "one"}, {"text": "two"}, {"text": "bé"}, {"text": "deep"}]
    pairs = jsonl(tmp_path / "p.jsonl", {"prompt": "p", "completion": "c", "text": "unused"})
    assert texts(pairs) == [{"prompt": "p", "completion": "c"}]
    (column,) = data.documents(data.find_source(jsonl(tmp_path / "c.jsonl", {"body": "b"})), text_column="body")
    assert (column.kind, column.content, column.where) == ("text", {"text": "b"}, f"{tmp_path / 'c.jsonl'}, line 1")


def test_datasets_from_disk_and_parquet(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_list([{"messages": CHAT}, {"messages": CHAT[:2]}])
    table.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "parts").mkdir()
    table.select([0]).to_parquet(str(tmp_path / "parts" / "a.parquet"))
    table.select([1]).to_parquet(str(tmp_path / "parts" / "b.parquet"))
    (tmp_path / "parts" / "README.md").write_text("# What this is")
    expected = [{"messages": CHAT}, {"messages": CHAT[:2]}]
    for source in (tmp_path / "saved", tmp_path / "parts"):
        assert texts(source) == expected
        first = data.ingest(source)
        written = first.batches[0].path.stat().st_mtime_ns
        assert data.ingest(source).hash == first.hash
        assert first.batches[0].path.stat().st_mtime_ns == written, "unchanged tables were read again"
    # The header of a README on the Hub says which files are data, of every kind.
    (tmp_path / "parts" / "README.md").write_text(HEADER.format(train="b.parquet", test="a.parquet"))
    assert texts(tmp_path / "parts") == expected[1:]


HEADER = (
    "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {train}\n"
    "  - split: test\n    path: {test}\n---\n"
)


def test_configured_splits(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    readme = folder / "README.md"
    readme.write_text(HEADER.format(train="main.jsonl", test="heldout.jsonl"))
    jsonl(folder / "main.jsonl", {"text": "train"})
    jsonl(folder / "heldout.jsonl", {"text": "test"})
    (folder / "statistics.csv").write_text("rows\n2\n")
    (tmp_path / "link").symlink_to(folder)
    for source in (folder, tmp_path / "link"):
        assert texts(source) == [{"text": "train"}]
        assert data.find_source(source).summary == (
            "1 file of the split train (main.jsonl); left out: heldout.jsonl, statistics.csv, README.md"
        )
    (folder / "main.png").write_text("text\nrow\n")
    readme.write_text(HEADER.format(train="main.*", test="heldout.jsonl"))
    with pytest.raises(
        DataError, match=r"README\.md configures files that cannot be read: main\.png\. Expected \.jsonl"
    ):
        data.find_source(folder)
    readme.write_text(
        HEADER.format(train="main.jsonl", test="heldout.jsonl").replace("split: train", "split: validation")
    )
    with pytest.raises(DataError, match=r"README\.md configures the splits validation, test, expected train"):
        data.find_source(folder)


FOLDERS = {
    "describing files": (
        "README.md LICENSE x.yaml dataset_infos.json config.json .gitattributes .git/a.json .git/b b.parquet sub/c.parquet",
        "b.parquet sub/c.parquet", "", ".git, .gitattributes, LICENSE, README.md, config.json and 2 more",
    ),
    "with JSONL": ("README.md readme_zh.txt a.jsonl", "a.jsonl", "", "README.md, readme_zh.txt"),
    "JSONL and text": ("a.jsonl b.txt image.png", "a.jsonl b.txt", "", "image.png"),
    "notes": ("README.md config.yaml", "README.md config.yaml", "", ""),
    "notes of several": ("README.md a.md image.png", "a.md", "", "image.png, README.md"),
    "a described program": ("README.md LICENSE a.py", "a.py", "", "LICENSE, README.md"),
    "notes with a licence": ("README.md LICENSE dataset_infos.json .git/a", "README.md", "", ".git, LICENSE, dataset_infos.json"),
    "no licence": ("license_plates.csv README", "license_plates.csv", "", "README"),
    "kinds of tables": ("b.csv a.parquet", "a.parquet b.csv", "", ""),
    "splits": (
        "README.md train-0.parquet train-1.parquet test.parquet more.parquet",
        "train-0.parquet train-1.parquet", "train", "more.parquet, test.parquet, README.md",
    ),
    "folders of splits": ("train/a.jsonl dev/a.jsonl", "train/a.jsonl", "train", "dev/a.jsonl"),
    "splits of text": ("train.txt valid.txt test.txt", "train.txt", "train", "test.txt, valid.txt"),
    "a program": ("train.py test_model.py model.py", "model.py test_model.py train.py", "", ""),
    "no training split": ("a.jsonl my-test.jsonl", "a.jsonl", "train", "my-test.jsonl"),
    "one split": ("eval.jsonl", "eval.jsonl", "test", ""),
}  # fmt: skip
"""Name → files of the folder, those that are read, their split, and those that are left out."""


@pytest.mark.parametrize("name", FOLDERS)
def test_what_a_folder_holds(name: str, tmp_path: Path) -> None:
    there, taken, split, left_out = FOLDERS[name]
    for file in there.split():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    source = data.find_source(tmp_path)
    names = [path.relative_to(tmp_path).as_posix() for path in source.files]
    assert names == taken.split()
    count = f"{len(names)} file{'s' * (len(names) > 1)}{f' of the split {split}' if split else ''}"
    assert source.summary == f"{count} ({', '.join(names)}){f'; left out: {left_out}' if left_out else ''}"


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (
            "a.parquet b.csv c.txt d.jsonl README.md",
            r"tables \(a.parquet, b.csv\) and text \(c.txt\)\. Expected one of the two\. Name a single file",
        ),
        (
            "test.csv val.csv",
            r"holds the splits test and validation, expected train\. Name a single file: test.csv, val.csv",
        ),
        ("image.png .hidden.txt", "the folder holds no text"),
    ],
)
def test_folders_that_are_refused(there: str, said: str, tmp_path: Path) -> None:
    for file in there.split():
        (tmp_path / file).touch()
    with pytest.raises(DataError, match=said):
        data.find_source(tmp_path)


def test_a_readme_with_files_that_cannot_be_read(tmp_path: Path) -> None:
    names = [f"a{end}" for end in (".xlsx", ".png", ".png.gz", ".zip", ".jsonl.zip", "")]
    for file in ("README.md", "LICENSE", "config.yaml"):
        (tmp_path / file).touch()
    for name in (*names, "license_plates.xlsx", "readme.jsonl.zip"):
        (tmp_path / name).touch()
        with pytest.raises(DataError, match=rf"cannot be read: {name}\. Expected \.jsonl, .*Unpack or convert"):
            data.find_source(tmp_path)
        (tmp_path / name).unlink()


def test_only_what_changed_is_read_again(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "corpus" / name).write_text(name)
    first = data.ingest(tmp_path / "corpus")
    written = first.batches[0].path.stat().st_mtime_ns
    assert data.ingest(tmp_path / "corpus") == first
    assert first.batches[0].path.stat().st_mtime_ns == written, "files that had not changed were read again"
    changed = tmp_path / "corpus" / "b.txt"
    before = changed.stat()
    changed.write_text("c.txt")
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))  # also where the time of the last change is set back
    assert data.ingest(tmp_path / "corpus").hash != first.hash
    changed.write_text("b.txt")
    for entry in (cache.parent / "sources").glob("*.json"):
        entry.write_text("[]")
    assert data.ingest(tmp_path / "corpus").hash == first.hash


def test_a_long_text_is_read_in_pieces_and_blank_lines_at_the_end_do_no_harm(tmp_path: Path) -> None:
    text = ("a line of a long text\n" * 1000 + "\n") * 450
    (tmp_path / "long.txt").write_text(text)
    first, second = data.documents(data.find_source(tmp_path / "long.txt"))
    assert first.content["text"] + second.content["text"] == text
    assert second.where == f"{tmp_path / 'long.txt'}, from line {first.content['text'].count(chr(10)) + 1}"
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n\n \n')
    assert len(list(data.documents(data.find_source(tmp_path / "rows.jsonl")))) == 1


BAD = {
    "malformed": (['{"text": "a"}', '{"text": "b"'], "line 2: malformed JSON: Expecting"),
    "empty object": (["{}"], "line 1: the row is empty, expected an object"),
    "a call of a tool": (
        ['{"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}]}'],
        "line 1: message 0 has a call without the name of its function",
    ),
    "no object": (["[1]"], "line 1: the row is 1, expected an object"),
    "no column": (['{"body": "a"}'], "line 1: lacks the column 'text'. It has 'body'"),
    "column missing later": (
        ['{"text": "a"}', '{"prompt": "a", "completion": "b"}'],
        "line 2: lacks the column 'text'",
    ),
    "half a pair": (['{"prompt": "a"}'], "line 1: lacks the column 'completion'"),
    "number": (['{"text": 3}'], "line 1: column 'text' is 3, expected a string"),
    "null": (['{"text": null}'], "line 1: column 'text' is null"),
    "empty text": (['{"text": " \\n"}'], "line 1: column 'text' is empty"),
    "empty completion": (['{"prompt": "a", "completion": ""}'], "line 1: column 'completion' is empty"),
    "half a character": (['{"text": "\\ud800"}'], "line 1: column 'text' holds half of a surrogate pair"),
    "no messages": (['{"messages": []}'], "line 1: column 'messages' is empty"),
    "message without role": (['{"messages": [{"content": "a"}]}'], "line 1: message 0 lacks 'role'"),
    "control character": (['{"text": "a\tb"}'], "line 1: malformed JSON: Invalid control character at column 12"),
    "message with null": (['{"messages": [{"role": "user", "content": null}]}'], "message 0's 'content' is null"),
    "deep": (["[" * 100_000], "line 1: malformed JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_row(name: str, tmp_path: Path, cache: Path, tokenizer: Any) -> None:
    rows, said = BAD[name]
    path = jsonl(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(DataError) as caught:
        data.ingest(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)
    with pytest.raises(DataError, match="line"):
        data.prepare_data(path, tokenizer, LLAMA_SPEC, seq_len=16)
    left = [entry for entry in cache.parent.rglob("*") if entry.is_file() and entry.suffix != ".lock"]
    assert {entry.parent.name for entry in left} <= {"packing"}, "something half-written"


def test_bad_files(tmp_path: Path) -> None:
    """Name → what lies there, and the words that occur."""
    files: dict[str, tuple[Any, str]] = {
        "empty.txt": (b"", "the file is empty"),
        "empty.jsonl": (b"", "the file is empty"),
        "blank.jsonl": (b"\n\n", "the file is empty"),
        "latin.txt": ("für".encode("latin-1"), r"not UTF-8 at byte 1.*iconv"),
        "latin.jsonl": (b'{"text": "a"}\n{"text": "\xfc"}\n', "line 2: not UTF-8"),
        "folder": (os.mkdir, "the folder holds no text"),
    }
    for name in ("memory.txt", "memory.jsonl"):  # reading it fails with EIO
        why = rf"{name}: cannot be read: Input/output error\. Check its permissions"
        files[name] = (lambda path: path.symlink_to("/proc/self/mem"), why)
    for name in ("pipe.jsonl", "pipe.parquet", "pipe.txt"):
        files[name] = (os.mkfifo, f"{name}: is a pipe or a device, expected a file")
    for name, (content, words) in files.items():
        (tmp_path / name).write_bytes(content) if isinstance(content, bytes) else content(tmp_path / name)
        with pytest.raises(DataError, match=words):
            data.ingest(tmp_path / name)
    for missing in (tmp_path / "no.jsonl", "no.txt", "./no", "data/no.jsonl", "/dev/zero"):
        words = "is a pipe or a device, expected a file" if missing == "/dev/zero" else "no such file or folder"
        with pytest.raises(DataError, match=words):
            data.ingest(missing)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"},
            "the Hugging Face Hub cannot be reached. Give a local file",
        ),
        ({"HF_HUB_OFFLINE": "1"}, "cannot be loaded as a dataset: "),
    ],
)
def test_hub_id_without_network(settings: dict[str, str], said: str, tmp_path: Path) -> None:
    code = (
        "import toolkit.data as d\nfrom toolkit.core.errors import DataError\n"
        "try: d.ingest('some/dataset')\nexcept DataError as error: print(error)"
    )
    run = python("-c", code, env=environment(HF_HOME=str(tmp_path), **settings), code=0)
    assert run.stdout.startswith("data some/dataset: ")
    assert said in run.stdout
    assert (run.stdout.count("\n"), run.stderr) == (1, "")


def test_refusals_before_anything_is_read(tokenizer: Any, tmp_path: Path, cache: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "a b c"})
    with pytest.raises(StrategyError, match=r"seq_len 128: tiny has positions for 64 tokens\. Use --seq-len 64"):
        data.prepare_data(path, tokenizer, replace(LLAMA_SPEC, max_positions=64), seq_len=128)
    with pytest.raises(DataError, match="packing: OPTForCausalLM does not keep"):
        data.prepare_data(path, tokenizer, replace(LLAMA_SPEC, architecture="OPTForCausalLM"), seq_len=16, packing=True)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no end-of-sequence token"):
        data.prepare_data(path, tokenizer, LLAMA_SPEC, seq_len=16)
    assert not cache.exists()


def test_too_little_for_a_global_batch(tokenizer: Any, tmp_path: Path) -> None:
    rows = data.prepare_data(jsonl(tmp_path / "a.jsonl", {"text": "a b c"}), tokenizer, LLAMA_SPEC, seq_len=16)
    assert rows.count == 1
    with pytest.raises(DataError, match="1 rows of 16, and one global batch takes 8"):
        data.check_batch(rows, TrainConfig(micro_batch=4), dp_size=2)
    long = jsonl(tmp_path / "p.jsonl", {"prompt": "a b c " * 20, "completion": "d"})
    with pytest.raises(DataError, match="no token to train on"):
        data.prepare_data(long, tokenizer, LLAMA_SPEC, seq_len=16)


def test_samples_are_spelled_so_that_they_can_be_found(tokenizer: Any, tmp_path: Path) -> None:
    texts = [{"text": f"number {index} of all these rows"} for index in range(60)]
    rows = data.prepare_data(jsonl(tmp_path / "a.jsonl", *texts), tokenizer, LLAMA_SPEC, seq_len=16)
    said = data.spell_samples(rows, tokenizer, list(range(rows.count)))
    assert said.startswith("row 0 ('")
    assert "number 0" in said
    assert " …), 8, 9, " in said
    assert said.endswith(f"of the rows in {rows.folder}")
    assert ", 68 more of the rows" in data.spell_samples(rows, tokenizer, [1] * 100)
    assert data.spell_samples(rows, None, [1, 2]) == f"row 1, row 2 of the rows in {rows.folder}"


# ---- packing, by value


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {},
    "mixtral": {"num_local_experts": 4},
    "phi": {},
    # These do not pack, each for a reason of its own.
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 32},
    "falcon": {"head_dim": None},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "gpt_oss": {"num_local_experts": 4},
}
NEITHER = {"opt", "falcon", "falcon_h1", "gpt_oss"}


@pytest.mark.parametrize(
    ("name", "attention"), [(n, a) for n in FAMILIES for a in ("eager", "sdpa") if (n, a) != ("gpt_oss", "sdpa")]
)
def test_packs_says_what_the_logits_say(name: str, attention: str) -> None:
    config = tiny(name, **FAMILIES[name])
    model = build(config, attention)
    generator = torch.Generator().manual_seed(1)
    first, other = (torch.randint(3, 4096, (2, 10), generator=generator) for _ in range(2))
    second = torch.randint(3, 4096, (2, 14), generator=generator)
    positions = torch.cat([torch.arange(10), torch.arange(14)]).expand(2, -1)
    with torch.no_grad():
        one, two = (
            model(input_ids=torch.cat([before, second], 1), position_ids=positions).logits for before in (first, other)
        )
        alone = model(input_ids=second, position_ids=positions[:, 10:]).logits
    assert (one[:, :10] - two[:, :10]).abs().max() > 0.1, "the first documents are too alike to prove anything"
    apart = bool(torch.allclose(one[:, 10:], two[:, 10:], atol=1e-5) and torch.allclose(one[:, 10:], alone, atol=1e-4))
    assert apart == (name not in NEITHER)
    assert data.supports_packing(spec_of(config)) == apart


def test_packs_refuses_the_unknown() -> None:
    assert not data.supports_packing(replace(LLAMA_SPEC, architecture="NobodyForCausalLM"))
    assert not data.supports_packing(replace(LLAMA_SPEC, kind="seq2seq"))
    assert not data.supports_packing(replace(LLAMA_SPEC, config={**LLAMA_SPEC.config, "is_causal": False}))
    images = transformers.Gemma3Config().to_dict()
    assert not data.supports_packing(replace(LLAMA_SPEC, architecture="Gemma3ForConditionalGeneration", config=images))


SENTENCES = [
    "import os",
    "def f(x):\n    return x + 1\n",
    "class A:\n    pass\n" * 3,
    "x = 1",
    "for i in range(10): print(i)\n" * 2,
]


def summed(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss's sum over trained tokens, as the model computes it."""
    count = (batch["labels"][:, 1:] != IGNORED).sum()
    loss: torch.Tensor = model(**batch).loss * count
    return loss


@pytest.mark.parametrize("packing", [True, False])
def test_loss_of_rows_is_the_loss_of_the_documents(packing: bool, tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.pad_token = tokenizer.eos_token
    rows = data.prepare_data(
        jsonl(tmp_path / "p.jsonl", *({"prompt": "#", "completion": text} for text in SENTENCES)),
        tokenizer, LLAMA_SPEC, seq_len=48, packing=packing, mask_prompts=False,
    )  # fmt: skip
    assert (rows.packed, rows.documents, rows.truncated) == (packing, 5, 0)
    assert rows.count < 5 if packing else rows.count == 5
    model = build(LLAMA)
    encoder = Encoder(tokenizer=tokenizer, mask_prompts=False, template=None)
    encoded = list(encoder.encode(data.documents(data.find_source(tmp_path / "p.jsonl"))))
    alone = [torch.tensor([document.ids]) for document in encoded]
    expected = sum(summed(model, {"input_ids": ids, "labels": ids}) for ids in alone)
    assert rows.tokens == sum(ids.numel() for ids in alone)
    assert rows.trained_tokens == sum(ids.numel() - 1 for ids in alone)
    loss = summed(model, rows.batch(range(rows.count)))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


def test_training_with_checkpointing_keeps_documents_apart(tokenizer: Any, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", *({"text": text} for text in SENTENCES))
    rows = data.prepare_data(path, tokenizer, LLAMA_SPEC, seq_len=64)
    batch, gradients = rows.batch(range(rows.count)), []
    for checkpointing in (False, True):
        model = build(LLAMA).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        model(**batch).loss.backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1])
    model = build(LLAMA)
    without = model(**batch).loss
    model.config.use_cache = True  # undoes the mask; once it does not, correct the docstring of `separates_documents`
    assert not torch.allclose(model(**batch).loss, without)


def test_flash_attention_gets_documents_apart(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, tmp_path: Path) -> None:
    """transformers' own dispatch, over a kernel in plain torch: which documents it is told of is what is asked."""
    lengths: list[list[int]] = []

    def by_bounds(q: Any, k: Any, v: Any, cu_seqlens_q: Any, **_: Any) -> Any:
        lengths.append(cu_seqlens_q.diff().tolist())
        return varlen.reference(q, k, v, cu_seqlens_q, cu_seqlens_q, scale=None, window_size=(-1, 0))

    def whole(*_: Any, **__: Any) -> Any:
        raise AssertionError("one causal sequence: documents see each other")

    kernels: Any = ((whole, by_bounds, None, None, None), (lambda **_: {}, None))
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda *_, **__: kernels)
    path = jsonl(tmp_path / "t.jsonl", *({"text": text} for text in SENTENCES))
    rows = data.prepare_data(path, tokenizer, LLAMA_SPEC, seq_len=32)
    ids = range(rows.count)
    model = build(LLAMA)
    expected = summed(model, rows.batch(ids))
    model.config._attn_implementation = "flash_attention_2"
    batch = rows.batch(ids, attention="flash_attention_2")
    assert batch["input_ids"].shape == (1, rows.count * 32)
    bounds = {name: batch[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")}
    assert bounds["cu_seq_lens_q"].dtype == torch.int32
    assert bounds["max_length_q"] == bounds["max_length_k"] == int(bounds["cu_seq_lens_q"].diff().max())
    assert isinstance(bounds["max_length_q"], int), "a layer would wait for the device"
    torch.testing.assert_close(summed(model, batch), expected)
    assert lengths[0] == [n for row in rows.batch(ids)["position_ids"].tolist() for n in runs(row)]
    with pytest.raises(AssertionError, match="see each other"):
        model(**rows.batch(ids))


def runs(positions: list[int]) -> list[int]:
    starts = [at for at, position in enumerate(positions) if position == 0] + [len(positions)]
    return [end - start for start, end in pairwise(starts)]


# ---- rows, exactly


def document(ids: list[int], trained: str = "", atomic: bool = False, split: int = 0) -> Encoded:
    return Encoded(ids=ids, trained=[flag == "1" for flag in trained or "1" * len(ids)], atomic=atomic, split=split)


def rows_of(documents: list[Encoded], **how: Any) -> tuple[list[dict[str, list[int]]], Counts]:
    counts = Counts()
    packed_rows = pack_rows(documents, counts, **{"kind": "causal", "packed": True, "seq_len": 6, "pad": 2, **how})
    return [{name: column.tolist() for name, column in row.items()} for row in packed_rows], counts


def test_packed_text_flows_on() -> None:
    packed_rows, counts = rows_of([document([5, 6, 7, 2]), document([8, 9, 10, 11, 2])])
    assert packed_rows == [
        {"input_ids": [5, 6, 7, 2, 8, 9], "labels": [-100, 6, 7, 2, -100, 9], "position_ids": [0, 1, 2, 3, 0, 1]},
        {
            "input_ids": [10, 11, 2, 2, 2, 2],
            "labels": [-100, 11, 2, -100, -100, -100],
            "position_ids": [0, 1, 2, 0, 1, 2],
        },
    ]
    assert counts == Counts(documents=2, tokens=9, trained_tokens=6, longest=5)


def test_packed_conversations_stay_whole() -> None:
    long = document(list(range(10, 18)), "00011111", atomic=True)
    prompt_only = document(list(range(20, 28)), "00000001", atomic=True)
    packed_rows, counts = rows_of(
        [document([5, 6, 7, 2], "0011", True), long, document([8, 2], "01", True), prompt_only]
    )
    assert [row["input_ids"] for row in packed_rows] == [[10, 11, 12, 13, 14, 15], [5, 6, 7, 2, 8, 2]]
    assert [row["labels"] for row in packed_rows] == [[-100] * 3 + [13, 14, 15], [-100, -100, 7, 2, -100, 2]]
    assert counts == Counts(documents=4, tokens=12, trained_tokens=6, truncated=2, dropped=1, longest=8)


def test_padded() -> None:
    packed_rows, counts = rows_of([document([5, 6, 2]), document([7, 8, 9, 10, 11, 12, 2])], packed=False)
    assert packed_rows[0] == {
        "input_ids": [5, 6, 2, 2, 2, 2],
        "labels": [-100, 6, 2] + [-100] * 3,
        "attention_mask": [1, 1, 1, 0, 0, 0],
    }
    assert [row["input_ids"] for row in packed_rows[1:]] == [[7, 8, 9, 10, 11, 12]]
    assert counts == Counts(documents=2, tokens=9, trained_tokens=7, dropped=1, longest=7)


def test_seq2seq() -> None:
    pair, text = document([5, 6, 2, 7, 2], "00011", True, 3), document([1, 3, 4, 5, 6, 7, 8, 9])
    packed_rows, counts = rows_of([pair, text], kind="seq2seq", seq_len=3, packed=False, pad=0)
    assert packed_rows == [
        {"input_ids": [5, 6, 2], "labels": [7, 2, -100], "attention_mask": [1, 1, 1]},
        {"input_ids": [1, 3, 4], "labels": [5, 6, 7], "attention_mask": [1, 1, 1]},
        {"input_ids": [8, 0, 0], "labels": [9, -100, -100], "attention_mask": [1, 0, 0]},
    ]
    assert counts == Counts(documents=2, tokens=13, trained_tokens=6, longest=8)


LONG = document(list(range(10, 24)), "00001111111111", atomic=True)


@pytest.mark.parametrize(
    ("too_long", "rows", "figures"),
    [
        ("cut", [[10, 11, 12, 13, 14, 15]], {"truncated": 1, "trained_tokens": 2}),
        ("drop", [], {"too_long": 1}),
        ("split", [[10, 11, 12, 13, 14, 15], [16, 17, 18, 19, 20, 21], [22, 23, 2, 2, 2, 2]], {"trained_tokens": 8}),
    ],
)
def test_too_long(too_long: str, rows: list[list[int]], figures: dict[str, int]) -> None:
    for packed in (True, False):
        packed_rows, counts = rows_of([LONG], too_long=too_long, packed=packed)
        assert [row["input_ids"] for row in packed_rows] == rows
        assert {name: getattr(counts, name) for name in figures} == figures
        assert (counts.documents, counts.longest) == (1, 14)
    text = document(list(range(10, 18)))
    assert len(rows_of([text], too_long=too_long)[0]) == (0 if too_long == "drop" else 2), (
        "a text goes on in the next row"
    )


def test_too_long_is_refused() -> None:
    long = replace(LONG, where="chat.jsonl, line 3")
    with pytest.raises(DataError, match=r"chat.jsonl, line 3: has 14 tokens, expected at most 6 \(--seq-len\)"):
        rows_of([long], too_long="refuse")
    with pytest.raises(DataError, match="under --too-long split"):
        rows_of([replace(long, split=2)], too_long="split", kind="seq2seq", packed=False)


def test_t5_trains_on_them(tokenizer: Any, tmp_path: Path) -> None:
    config = tiny("t5", d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0)
    spec = spec_of(config, kind="seq2seq")
    pairs = jsonl(tmp_path / "p.jsonl", *({"prompt": text, "completion": "yes"} for text in SENTENCES))
    rows = data.prepare_data(pairs, tokenizer, spec, seq_len=32)
    batch = rows.batch([0, 1])
    assert tokenizer.decode(batch["labels"][0][batch["labels"][0] != IGNORED]) == "yes<|eos|>"
    assert tokenizer.decode(batch["input_ids"][0][batch["attention_mask"][0] == 1]) == SENTENCES[0]
    loss = build(config)(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)
    with pytest.raises(DataError, match="line 1: messages train a causal model"):
        data.prepare_data(jsonl(tmp_path / "m.jsonl", {"messages": CHAT}), tokenizer, spec, seq_len=32)


# ---- what is trained


def trained_text(rows: data.Rows, tokenizer: Any) -> str:
    labels = rows.batch(range(rows.count))["labels"]
    return str(tokenizer.decode(labels[labels != IGNORED]))


def test_prompts_are_masked(tokenizer: Any, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", {"prompt": "import ", "completion": "os.path"})
    assert (
        trained_text(data.prepare_data(path, tokenizer, LLAMA_SPEC, seq_len=16), tokenizer) == " os.path<|eos|>"
    )  # the token over the border
    everything = data.prepare_data(path, tokenizer, LLAMA_SPEC, seq_len=16, mask_prompts=False)
    assert everything.trained_tokens == everything.tokens - 1


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_only_the_assistant_is_trained(template: str, tokenizer: Any, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "m.jsonl", {"messages": CHAT}, {"messages": [*CHAT[:2], CHAT[2]]})
    file = tmp_path / "template.jinja"
    file.write_text(template, encoding="utf-8")
    rows = data.prepare_data(path, tokenizer, LLAMA_SPEC, seq_len=64, chat_template=file, packing=False)
    assert trained_text(rows, tokenizer) == "import os\nreturn 0\nimport os\n"
    tokenizer.chat_template = template
    own = data.prepare_data(path, tokenizer, LLAMA_SPEC, seq_len=64, packing=False)
    assert trained_text(own, tokenizer) == trained_text(rows, tokenizer)


def test_chat_refusals(tokenizer: Any, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "m.jsonl", {"messages": CHAT})
    (tmp_path / "empty").write_text(" \n")
    os.mkfifo(tmp_path / "pipe")
    unreadable = "cannot be read: it is not a regular file"
    forgetful = (
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}<{{ m.role }}>{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    nothing = "line 1: no token to train on, since the chat template renders nothing"
    fix = "Give a UTF-8 file with a Jinja template"
    for template, packing, words in (
        (None, None, r"line 1: has messages, and the tokenizer .* no chat template. Give one with --chat-template"),
        ("nowhere.jinja", None, r"chat template nowhere\.jinja: cannot be read"),
        (tmp_path / "empty", None, f"empty: cannot be read: it is empty. {fix}"),
        (tmp_path / "pipe", None, f"pipe: {unreadable}. {fix}"),
        ("/dev/zero", None, f"chat template /dev/zero: {unreadable}"),
        *((template, packing, nothing) for template in ("{# nothing #}", "{{ '' }}") for packing in (None, False)),
        ("{{ raise_exception('users only') }}", None, "line 1: the chat template refuses these messages: users only"),
        (forgetful, None, r"message 1: the assistant's turn cannot be located.*generation"),
    ):
        with pytest.raises(DataError, match=words):
            data.prepare_data(path, tokenizer, LLAMA_SPEC, seq_len=64, chat_template=template, packing=packing)
    # A tokenizer that makes no token of whitespace: transformers' own mask loses the end of the marked part.
    words = Tokenizer(models.WordLevel(unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(
        [m["content"] + "<user><assistant>" for m in CHAT], trainers.WordLevelTrainer(special_tokens=["?", "."])
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="?", eos_token=".", pad_token="."
    )
    rows = data.prepare_data(path, tokenizer, LLAMA_SPEC, seq_len=64, chat_template=MARKED, packing=False)
    assert trained_text(rows, tokenizer) == "import os return 0"


# ---- the cache


def test_cache(tokenizer: Any, tmp_path: Path, cache: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", *({"text": text} for text in SENTENCES))

    def prepare(seq_len: int = 16, **how: Any) -> data.Rows:
        return data.prepare_data(path, tokenizer, LLAMA_SPEC, seq_len=seq_len, **how)

    rows = prepare()
    assert rows.folder == cache / rows.fingerprint
    names = {file.name for file in rows.folder.iterdir()}
    assert names == {"meta.json", "input_ids.bin", "labels.bin", "position_ids.bin"}
    written = rows.folder.stat().st_mtime_ns
    assert prepare() == rows == data.find_rows(rows.fingerprint)
    assert rows.folder.stat().st_mtime_ns == written
    assert json.loads(rows.to_json())["fingerprint"] == rows.fingerprint
    assert "trained_tokens" in str(rows)
    prints = {rows.fingerprint, prepare(seq_len=17).fingerprint, prepare(packing=False).fingerprint}
    prints |= {prepare(mask_prompts=False).fingerprint, prepare(chat_template="{{ 1 }}").fingerprint}
    tokenizer.add_tokens(["return"])
    prints.add(data.prepare_data(path, tokenizer, replace(LLAMA_SPEC, vocab=5000), seq_len=16).fingerprint)
    path.write_text(path.read_text(encoding="utf-8").replace("import", "export"), encoding="utf-8")
    prints.add(data.prepare_data(path, tokenizer, replace(LLAMA_SPEC, vocab=5000), seq_len=16).fingerprint)
    assert len(prints) == 7


def test_damaged_rows_documents_and_sources_are_made_again(tokenizer: Any, tmp_path: Path, cache: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", *({"text": text} for text in SENTENCES))

    def prepare(seq_len: int = 16) -> tuple[data.Rows, dict[str, Any]]:
        rows = data.prepare_data(path, tokenizer, LLAMA_SPEC, seq_len=seq_len)
        return rows, {name: column.tolist() for name, column in rows.columns.items()}

    expected, other = prepare(), prepare(seq_len=8)[0].folder
    folder = expected[0].folder
    labels, meta = folder / "labels.bin", folder / "meta.json"
    (entry,) = (cache.parent / "sources").glob("*.json")
    (documents,) = (cache.parent / "documents").iterdir()
    values = json.loads(meta.read_text())["value"]

    def rewrite(file: Path, **changes: Any) -> None:
        file.write_text(json.dumps({"sha256": "0" * 64, "value": {**json.loads(file.read_text())["value"], **changes}}))

    def replace_by(put: Callable[[Path], Any], file: Path) -> None:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
        put(file)

    damages: list[Callable[[], Any]] = [
        lambda: os.truncate(labels, 8),
        lambda: replace_by(os.mkfifo, labels),
        lambda: replace_by(os.mkfifo, meta),
        lambda: replace_by(os.mkfifo, folder),
        lambda: replace_by(lambda file: file.symlink_to("/etc"), folder),
        lambda: replace_by(lambda file: shutil.copytree(other, file), folder),
        lambda: (folder / "meta.json").write_text("[" * 200_000),
        *(
            partial(rewrite, meta, **{name: junk})
            for name in ("count", "seq_len", "fingerprint")
            for junk in (-1, "4", values[name])
        ),
    ]
    for number, break_it in enumerate(damages):
        break_it()
        assert data.find_rows(expected[0].fingerprint) is None, number
        assert prepare() == expected, number
    sources: list[Callable[[], Any]] = [
        lambda: replace_by(os.mkfifo, entry),
        lambda: rewrite(entry, hash="../../x"),
        lambda: rewrite(entry, hash=4),
        lambda: entry.write_text("[" * 200_000),
        lambda: replace_by(os.mkfifo, documents),
        lambda: replace_by(Path.mkdir, documents),
        lambda: os.truncate(documents, 100),
    ]
    for number, break_it in enumerate(sources):
        break_it()
        shutil.rmtree(folder)
        assert prepare() == expected, number
    assert sorted(cache.glob("*/")) == sorted([folder, other]), "something half-written"


@pytest.mark.parametrize("module", [ingestion, rows_module])
def test_a_killed_preparation_starts_over(
    module: Any, tokenizer: Any, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "t.jsonl", *({"text": text} for text in SENTENCES * 50))

    def prepare() -> data.Rows:
        return data.prepare_data(f"{path}:0.5", tokenizer, LLAMA_SPEC, seq_len=16, packing=False)

    write = module._write

    def killed(*arguments: Any) -> None:
        write(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write", killed)
        if not (child := os.fork()):
            prepare()
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert list(cache.parent.glob("*/.*/*")), "half-written files are left"
    assert prepare().count > 0
    assert not list(cache.parent.glob("*/.*")), "and are removed"


@pytest.mark.dist
def test_ranks_that_come_at_once_make_it_once(tokenizer_folder: Path, tmp_path: Path, cache: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", *({"text": text} for text in SENTENCES * 200))
    spec = {field.name: getattr(LLAMA_SPEC, field.name) for field in fields(ModelSpec)}
    code = f"""
import sys, transformers, toolkit.data as d
from toolkit.models import ModelSpec
tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained({str(tokenizer_folder)!r})
opened = []
sys.addaudithook(lambda event, about: opened.append(about[0]) if event == "open" and {str(path)!r} == about[0] else None)
rows = d.prepare_data({str(path)!r}, tokenizer, ModelSpec(**{spec!r}), seq_len=16, packing=False)
print(rows.to_json().strip(), len(opened), sep="\\n---")
"""
    command = [sys.executable, "-c", code]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said, opens = zip(*(process.communicate(timeout=120)[0].split("\n---") for process in started), strict=True)
    assert said[0] == said[1] == said[2] != ""
    assert sorted(map(int, opens)) == [0, 0, 1], "the file is read once, by one of them"
    assert [entry.name for entry in cache.iterdir() if entry.suffix != ".lock"] == [json.loads(said[0])["fingerprint"]]


def test_several_processes_give_the_same_rows(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mixed").mkdir()
    monkeypatch.setattr(ingestion, "BATCH_DOCUMENTS", 10)
    jsonl(tmp_path / "mixed" / "c.jsonl", *[{"messages": CHAT}] * 7)
    jsonl(tmp_path / "mixed" / "p.jsonl", *({"prompt": f"{n}", "completion": "x" * n} for n in range(1, 70)))
    jsonl(tmp_path / "mixed" / "t.jsonl", *({"text": f"{n} " * n} for n in range(1, 90)))
    (tmp_path / "mixed" / "z.txt").write_text("\n".join(SENTENCES))

    def prepare() -> dict[str, Any]:
        rows = data.prepare_data(tmp_path / "mixed", tokenizer, LLAMA_SPEC, seq_len=16, chat_template=TEMPLATE)
        columns = {name: column.tolist() for name, column in rows.columns.items()}
        (rows.folder / "meta.json").rename(tmp_path / "meta.json")
        rows.folder.rename(tmp_path / f"rows-{len(list(tmp_path.iterdir()))}")
        return {**columns, "meta": (tmp_path / "meta.json").read_text()}

    alone, environ = prepare(), os.environ
    monkeypatch.setattr(tokenization, "PROCESS_BYTES", 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2})
    assert prepare() == alone
    assert os.environ is environ
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    with pytest.raises(DataError, match=r"c\.jsonl, line 1: the chat template refuses these messages: no"):
        data.prepare_data(
            tmp_path / "mixed", tokenizer, LLAMA_SPEC, seq_len=16, chat_template="{{ raise_exception('no') }}"
        )


ENDED = """
import json, os, signal, sys, time
import transformers
import toolkit.data as data
from toolkit.data import tokenization
from toolkit.models import ModelSpec

folder, path, spec, template = sys.argv[1:]
tokenizer, spec = transformers.PreTrainedTokenizerFast.from_pretrained(folder), ModelSpec(**json.loads(spec))
tokenization.PROCESS_BYTES, os.sched_getaffinity = 1, lambda process: {0, 1}

def tokenize(interrupted_as_it_forks):
    mine = os.getpid()
    if interrupted_as_it_forks:
        os.register_at_fork(after_in_parent=lambda: os.getpid() == mine and os.kill(mine, signal.SIGINT))
    data.prepare_data(path, tokenizer, spec, seq_len=16, chat_template=template)

def gone(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True

def until(true):
    deadline = time.monotonic() + 60
    while not (value := true()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return value

for number, as_it_forks in ((signal.SIGKILL, False), (signal.SIGINT, False), (signal.SIGINT, True)):
    parent = os.fork()
    if not parent:
        os.setpgid(0, 0)
        tokenize(as_it_forks)
        os._exit(1)
    if not as_it_forks:
        assert until(lambda: len(open(f"/proc/{parent}/task/{parent}/children").read().split()) == 2)
        os.kill(parent, number)
    ended = until(lambda: os.waitpid(parent, os.WNOHANG)[1])
    print(json.dumps([os.waitstatus_to_exitcode(ended), until(lambda: gone(parent))]), flush=True)
"""


def test_processes_that_tokenize_end_with_their_parent(tokenizer_folder: Path, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "m.jsonl", *[{"messages": CHAT}] * 20_000)
    spec = json.dumps({field.name: getattr(LLAMA_SPEC, field.name) for field in fields(ModelSpec)})
    done = python("-c", ENDED, tokenizer_folder, path, spec, TEMPLATE, code=0)
    endings = [json.loads(line) for line in done.stdout.splitlines()]
    assert endings == [[-signal.SIGKILL, True], [-signal.SIGINT, True], [-signal.SIGINT, True]], done.stderr


# ---- order and batches


@pytest.fixture
def rows(tokenizer: Any, tmp_path: Path) -> data.Rows:
    path = jsonl(tmp_path / "r.jsonl", *({"text": f"value_{n} = {n}\n" * 3} for n in range(40)))
    return data.prepare_data(path, tokenizer, LLAMA_SPEC, seq_len=32)


def test_order() -> None:
    order = data.Order(rows=10, seed=3)
    epochs = [order.ids(10 * epoch, 10) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert order.ids(7, 20) == [*epochs[0][7:], *epochs[1], *epochs[2][:7]]
    assert order.ids(0, 10) != data.Order(rows=10, seed=4).ids(0, 10)
    assert order.ids(0, 10) == [1, 5, 9, 0, 4, 7, 2, 8, 3, 6], "the order of a seed is a promise: runs resume by it"


def taken(
    rows: data.Rows, train_config: TrainConfig, ranks: int, start: int = 0
) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Step by step, every rank's micro-batches in the order that the docstring gives."""
    loaders = [
        iter(data.batches(rows, train_config, dp_rank=rank, dp_size=ranks, start_step=start)) for rank in range(ranks)
    ]
    for _ in range(start, train_config.steps):
        yield [next(loader) for _ in range(train_config.accumulation) for loader in loaders]
    assert all(next(loader, None) is None for loader in loaders)


@pytest.mark.parametrize("packing", [True, False])
def test_only_rows_that_a_training_takes_need_a_mask(packing: bool, tokenizer: Any, tmp_path: Path) -> None:
    """The last row of a long document is padded. Most trainings do not take it in their first steps."""
    path = jsonl(tmp_path / "long.jsonl", {"text": "".join(f"value_{n} = {n}\n" for n in range(40))})
    rows = data.prepare_data(path, tokenizer, LLAMA_SPEC, seq_len=32, packing=packing)
    last = data.Order(rows=rows.count, seed=0).ids(0, rows.count).index(rows.count - 1)
    for steps, expected in ((last // 2, True), (last // 2 + 1, False), (rows.count, False)):
        assert data.one_document(rows, TrainConfig(micro_batch=1, steps=max(1, steps)), dp_size=2) is expected


def test_a_step_is_the_same_on_any_ranks(rows: data.Rows) -> None:
    splits = [(4, 1, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)]
    steps = []
    for micro, accumulation, ranks in splits:
        train_config = TrainConfig(micro_batch=micro, accumulation=accumulation, steps=2 * rows.count // 4)
        inputs = [torch.cat([batch["input_ids"] for batch in step]) for step in taken(rows, train_config, ranks)]
        ids = [data.sample_ids(rows, train_config, dp_size=ranks, step=step) for step in range(train_config.steps)]
        assert all(torch.equal(rows.batch(of)["input_ids"], step) for of, step in zip(ids, inputs, strict=True))
        assert [step.dtype for step in inputs] == [torch.int64] * train_config.steps
        steps.append((torch.stack(inputs), [data.hash_ids(of) for of in ids]))
        resumed = [
            torch.cat([batch["input_ids"] for batch in step]) for step in taken(rows, train_config, ranks, start=3)
        ]
        assert torch.equal(torch.stack(resumed), steps[0][0][3:])
    assert all(torch.equal(inputs, steps[0][0]) and hashes == steps[0][1] for inputs, hashes in steps)
    assert len(set(steps[0][1])) == len(steps[0][1]), "two steps took the same samples"


def test_loaders_leave_the_generator_and_accelerate_alone(rows: data.Rows) -> None:
    loader = data.batches(rows, TrainConfig(micro_batch=2, steps=3), dp_rank=0, dp_size=1)
    assert Accelerator(cpu=True).prepare(loader) is loader
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert len(list(loader)) == len(loader) == 3
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("evaluates", [False, True])
def test_spawned_workers_take_the_same_batches(rows: data.Rows, evaluates: bool) -> None:
    if evaluates:
        loader = data.eval_batches(rows, micro_batch=3, dp_rank=1, dp_size=2)
    else:
        loader = data.batches(rows, TrainConfig(micro_batch=3, steps=4), dp_rank=1, dp_size=2, start_step=2)
    expected = list(loader)
    pickled = pickle.dumps(loader.dataset)
    assert len(pickled) < rows.count * rows.seq_len, "the data themselves are pickled"
    dataset = pickle.loads(pickled)
    assert len(dataset) == len(expected) > 1
    for index, batch in enumerate(expected):
        assert all(torch.equal(dataset[index][name], tensor) for name, tensor in batch.items())


@pytest.mark.parametrize(("micro", "ranks"), [(1, 1), (3, 2), (4, 4), (64, 2)])
def test_evaluation_takes_every_row_once(rows: data.Rows, micro: int, ranks: int) -> None:
    shares = [list(data.eval_batches(rows, micro_batch=micro, dp_rank=rank, dp_size=ranks)) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    batches = [batch for share in shares for batch in share]
    assert {tuple(batch["input_ids"].shape) for batch in batches} == {(micro, 32)}
    kept = [row for batch in batches for row in batch["labels"] if (row != IGNORED).any()]
    expected = rows.batch(range(rows.count))["labels"]
    assert Counter(map(str, (row.tolist() for row in kept))) == Counter(map(str, expected.tolist()))
    trained = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
    assert trained == rows.trained_tokens


def test_embedded_data_end_to_end(tokenizer: Any) -> None:
    rows = data.prepare_data(None, tokenizer, LLAMA_SPEC, seq_len=256)
    assert (rows.packed, rows.dropped, rows.truncated) == (True, 0, 0)
    assert rows.documents == len(data.embedded_files())
    assert rows.count == -(-rows.tokens // 256)
    batch = next(iter(data.batches(rows, TrainConfig(), dp_rank=0, dp_size=2)))
    assert {name: tuple(column.shape) for name, column in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids"), (4, 256)
    )
    assert tokenizer.decode(rows.columns["input_ids"][0][:200]) in data.embedded_files()[0].read_text(encoding="utf-8")
