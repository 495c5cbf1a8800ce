"""What SECURITY.md promises: secrets stay inside, code runs only where it is trusted, and no file leads out of its folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import runs
import tiny
import torch
from programs import ROOT, environment, holds, python, start, until
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from toolkit import cli
from toolkit.checkpoints.manifest import read_manifest
from toolkit.config.fields import from_dict
from toolkit.config.strategy import Strategy
from toolkit.core import atomic_io
from toolkit.core.display import Result, Table
from toolkit.core.errors import CheckpointError, DataError, ModelError, RunError, StrategyError
from toolkit.core.redaction import redact, redact_all
from toolkit.data.files import Document
from toolkit.data.tokenization import Encoder
from toolkit.models import describe, local_weights, require_weights
from toolkit.models.hf_loading import load_tokenizer
from toolkit.models.remote_code import digest_of
from toolkit.run_folder import folder
from toolkit.run_folder.run_json import read_run_json
from toolkit.training.resumption import merge_config

SECRET = "swordfish-4711"
HUB = "hf_" + "aB3" * 12


# Secrets ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of every kind that is known by its place."""
    home = tmp_path_factory.mktemp("home")
    (home / "token").write_text("from-the-token-file\n")
    (home / "netrc").write_text("machine api.wandb.ai\n  login user\n  password from-the-netrc\n")
    known = {
        "HF_TOKEN": SECRET, "MY_SERVICE_API_KEY": "key-of-service", "AWS_SECRET_ACCESS_KEY": 'wJ/a"b+c\\dé f',
        "db_password": "first line\nsecond line", "SHORT_TOKEN": "true", "DB_PASSWORD_FILE": "/run/secrets/password",
        "TOOLKIT_RUN_TOKEN": "e" * 32, "HF_TOKEN_PATH": str(home / "token"), "NETRC": str(home / "netrc"),
    }  # fmt: skip
    for name, value in known.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"a {SECRET}!", "a [redacted]!"),
        ("key-of-service", "[redacted]"),
        ('wJ/a"b+c\\dé f', "[redacted]"),
        (json.dumps('wJ/a"b+c\\dé f'), '"[redacted]"'),
        ("s3://b?x=wJ%2Fa%22b%2Bc%5Cd%C3%A9%20f", "s3://b?x=[redacted]"),
        ("first line and second line", "[redacted] and [redacted]"),
        ("from-the-token-file, from-the-netrc", "[redacted], [redacted]"),
        (f"x={HUB}.", "x=[redacted]."),
        ("wandb: key=" + "0a" * 20, "wandb: key=[redacted]"),
        ("'Authorization': 'Basic dXNlcjpwYXNz'", "'Authorization': 'Basic [redacted]'"),
        ("Bearer abc.def-123", "Bearer [redacted]"),
        ("https://user:p@ss@host/x", "https://[redacted]@host/x"),
        ("https://sometoken@github.com/x", "https://[redacted]@github.com/x"),
        ("https://cdn/x?Expires=1&Signature=abc~def_ghi&n=2", "https://cdn/x?Expires=1&Signature=[redacted]&n=2"),
        ("WANDB_API_KEY=abcdefgh12", "WANDB_API_KEY=[redacted]"),
        ("AKIAIOSFODNN7EXAMPLE", "[redacted]"),
    ],
)
def test_secrets_are_redacted(text: str, shown: str, secrets: None) -> None:
    assert redact(text) == shown
    assert redact_all({"a": [text, 1, None]}) == {"a": [shown, 1, None]}


@pytest.mark.parametrize(
    "text",
    [
        "true", "/run/secrets/password", "e" * 32, "sha256 " + "0a" * 32, "missing key: model.layers.0.mlp.weight",
        "commit " + "0a" * 20, "ssh://git@github.com/x", "pad_token: '<|endoftext|>', num_tokens: 123456789",
        "https://huggingface.co/Qwen/Qwen3-8B?x=1", "hf_hub_download, hf_deepspeed_config", "task-of-2026-11-21-at-dawn",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(text: str, secrets: None) -> None:
    assert redact(text) == text


def test_secrets_are_in_no_file_message_or_result(
    tmp_path: Path, secrets: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON, events, error files, errors, results; the shell's output, its crashes included."""

    class Secret(Result):
        def tables(self) -> list[Table]:
            return [Table(columns=(SECRET,), rows=[('wJ/a"b+c\\dé f',)])]

        def to_dict(self) -> dict[str, Any]:
            return {"a": SECRET}

    atomic_io.write_json(tmp_path / "x.json", {"a": (SECRET, {"b": HUB}), "n": float("nan")})
    atomic_io.append_line(tmp_path / "events.jsonl", {"error": SECRET})
    with folder.enter(tmp_path / "run") as run:
        run.record_error(0, RuntimeError(f"Bearer {SECRET}"))
    result = Secret()
    shown = [str(result), result._repr_html_(), result.to_json(), str(RunError(f"no {SECRET}"))]
    assert cli.main(["describe", str(tmp_path / SECRET), "--json", str(tmp_path / "y.json")]) == 2

    def describe(flags: Any) -> Result:
        """A verb."""
        if flags.model == "crash":
            print(SECRET)
            raise RuntimeError(SECRET)
        return Secret()

    monkeypatch.setattr("toolkit.cli.parser.describe", describe)
    assert cli.main(["describe", "--json", str(tmp_path / "y.json")]) == 0
    assert json.loads((tmp_path / "y.json").read_text()) == {"a": "[redacted]"}
    assert cli.main(["describe", "crash"]) == 1
    out, err = capfd.readouterr()
    assert "RuntimeError: [redacted]" in err
    texts = [out, err, *shown, *(path.read_text() for path in tmp_path.rglob("*") if path.is_file())]
    for text in texts:
        assert SECRET not in text
        assert HUB not in text
        assert not re.search(r"wJ/a|c\\\\d", text)
    assert sum("[redacted]" in text for text in texts) == 10  # both streams, four results, four files


SPEAK = """
import os, subprocess, sys, time
from pathlib import Path
from toolkit.core.rank_output import tee_output
tee_output(Path(sys.argv[1]), rank=int(sys.argv[2]), supervised=sys.argv[3] == "supervised", token=sys.argv[1])
print("out", os.environ["HF_TOKEN"])
print("err", os.environ["HF_TOKEN"], file=sys.stderr)
subprocess.run(["sh", "-c", "echo child $HF_TOKEN"])
os.write(1, b"in two "); os.write(1, os.environ["HF_TOKEN"][:5].encode()); os.write(1, os.environ["HF_TOKEN"][5:].encode() + b"\\n")
os.write(1, b"\\rbar 1" + b"\\rbar 2 \\xff" + os.environ["HF_TOKEN"].encode())
Path(sys.argv[1] + ".pid").write_text(str(os.getpid()))
time.sleep(60)
"""


@pytest.mark.parametrize(("rank", "how"), [(0, "supervised"), (1, "supervised"), (1, "bare")])
def test_what_a_rank_prints_is_redacted_and_its_last_words_are_kept(tmp_path: Path, rank: int, how: str) -> None:
    """Ended by SIGKILL, in the middle of a line; rank 0's reader is gone before."""
    log = tmp_path / "rank.log"
    with start("-c", SPEAK, log, rank, how, env=environment(HF_TOKEN=SECRET), text=False) as rank_process:
        until(partial(holds, log, "bar 2"))  # a bar is there at once, without a newline
        os.kill(int(Path(f"{log}.pid").read_text()), signal.SIGKILL)
        out, err = rank_process.communicate(timeout=30)
    kept = log.read_bytes()
    assert SECRET.encode() not in kept + out + err
    assert kept.count(b"[redacted]") == 5
    assert kept.endswith(b"bar 2 \xff[redacted]")
    if how == "bare":
        assert err == b"err [redacted]\n"
    shown = out if rank == 0 else kept if how == "supervised" else kept.replace(err, b"")
    assert shown == (out if how == "bare" else kept)


COPY = """
import os, sys
from toolkit.core.redaction import copy
copy(0, [1, *(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) for path in sys.argv[1:])])
"""


def test_a_closed_reader_or_a_full_disk_stops_no_rank(tmp_path: Path) -> None:
    """What cannot be written in one place is written in the other."""
    log = tmp_path / "log"
    with start("-c", COPY, log, stdin=subprocess.PIPE, text=False) as passing:
        passing.stdout.close()
        for number in range(3):
            passing.stdin.write(b"line %d\n" % number)
            passing.stdin.flush()
            until(partial(holds, log, f"line {number}\n"))
    assert passing.returncode == 0
    done = python("-c", COPY, "/dev/full", input="line\n", code=0)
    assert (done.stdout, done.stderr) == ("line\n", "")


def test_a_line_without_end_passes_whole() -> None:
    text = "x" * 3_000_000 + SECRET + " y" * 1000
    done = python("-c", COPY, input=text, env=environment(A_TOKEN=SECRET), code=0)
    assert done.stdout == text.replace(SECRET, "[redacted]")


# A model's own code ----------------------------------------------------------------------------------------------------

CANARY = """
import os
with open(os.environ["CANARY"], "a") as file:
    file.write(__name__.rpartition(".")[2] + "\\n")
"""

CONFIGURATION = f"""{CANARY}
from transformers import LlamaConfig

class MineConfig(LlamaConfig):
    model_type = "mine"
"""

MODELING = f"""{CANARY}
from transformers import LlamaForCausalLM
from .configuration_mine import MineConfig

class Mine(LlamaForCausalLM):
    config_class = MineConfig
"""

AUTO_MAP = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.Mine"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with classes of its own, weights, a tokenizer and data."""
    root = tmp_path_factory.mktemp("made")
    tiny.llama(root / "mine", num_hidden_layers=1)
    _change(root / "mine" / "config.json", model_type="mine", architectures=["Mine"], auto_map=AUTO_MAP)
    (root / "mine" / "configuration_mine.py").write_text(CONFIGURATION)
    (root / "mine" / "modeling_mine.py").write_text(MODELING)
    (root / "data.txt").write_text(" ".join(f"w{i % 60}" for i in range(2000)))
    return root


@pytest.fixture
def mine(made: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(made / "mine", tmp_path / "mine"))


@pytest.fixture
def canary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the model's code writes when it runs."""
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    return tmp_path / "canary"


def _change(path: Path, **values: Any) -> None:
    """Values that are None are removed."""
    changed = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))


def test_a_models_own_code_is_refused_by_name_with_the_flag(
    mine: Path, canary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "--model", str(mine)]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "\n" not in err.strip()
    assert "(configuration_mine.py, modeling_mine.py), which runs only if you trust it" in err
    assert f"--trust-remote-code {digest_of(mine)}," in err
    assert not canary.exists()


@pytest.mark.parametrize("revision", ["main", "v1.0", "abcdef0", "a" * 40, "a" * 64, ""])
def test_only_the_exact_revision_is_trusted(revision: str, mine: Path, canary: Path) -> None:
    with pytest.raises(ModelError, match=f"expected the sha256 of its .*{digest_of(mine)} now"):
        describe(mine, trust_remote_code=revision)
    assert not canary.exists()


def test_changed_code_is_not_trusted_any_more(mine: Path, canary: Path) -> None:
    """One byte, another file, another name: even of a file that no config names."""
    trusted, seen = digest_of(mine), set()
    changes: list[Callable[[], object]] = [
        lambda: (mine / "modeling_mine.py").write_text(MODELING + " "),
        lambda: (mine / "helper.py").write_text(""),
        lambda: (mine / "helper.py").rename(mine / "helper2.py"),
    ]
    for change in changes:
        change()
        seen.add(digest_of(mine))
        with pytest.raises(ModelError, match=f"--trust-remote-code {trusted} is not its code"):
            describe(mine, trust_remote_code=trusted)
    assert len(seen | {trusted}) == 4
    assert not canary.exists()


@pytest.mark.parametrize(
    "reference", ["somebody/else--modeling_mine.Mine", "../modeling_mine.Mine", "/tmp/modeling_mine.Mine", "a..Mine"]
)
def test_code_from_elsewhere_is_refused(reference: str, mine: Path, canary: Path) -> None:
    _change(mine / "config.json", auto_map={**AUTO_MAP, "AutoModelForCausalLM": reference})
    for trust in (None, digest_of(mine)):
        with pytest.raises(ModelError, match=re.escape(f"takes code from elsewhere ({reference!r}")):
            describe(mine, trust_remote_code=trust)
    assert not canary.exists()


def test_code_that_is_a_link_or_missing_is_refused(mine: Path, canary: Path, tmp_path: Path) -> None:
    (mine / "modeling_mine.py").rename(tmp_path / "elsewhere.py")
    with pytest.raises(ModelError, match=r"its folder lacks modeling_mine\.py"):
        describe(mine)
    (mine / "modeling_mine.py").symlink_to(tmp_path / "elsewhere.py")
    with pytest.raises(ModelError, match=r"modeling_mine\.py is a link that leaves its folder"):
        describe(mine, trust_remote_code="a" * 64)
    assert not canary.exists()


def test_a_tokenizers_own_code_is_refused_with_the_flag(mine: Path, canary: Path) -> None:
    """With a model that transformers has itself."""
    _change(mine / "config.json", model_type="llama", architectures=["LlamaForCausalLM"], auto_map=None)
    for path in mine.glob("*mine.py"):
        path.unlink()
    with pytest.raises(ModelError, match="has no own code to trust"):
        describe(mine, trust_remote_code="a" * 64)
    (mine / "tokenization_mine.py").write_text(
        f"{CANARY}\nfrom transformers import PreTrainedTokenizerFast\nclass Words(PreTrainedTokenizerFast):\n    pass\n"
    )
    _change(
        mine / "tokenizer_config.json",
        tokenizer_class="Words",
        auto_map={"AutoTokenizer": [None, "tokenization_mine.Words"]},
    )
    (mine / "tokenizer.json").rename(mine / "kept.json")  # or transformers would do without the class
    spec = describe(mine)
    with pytest.raises(ModelError, match=rf"\(tokenization_mine\.py\).*--trust-remote-code {digest_of(mine)},"):
        load_tokenizer(spec)
    assert not canary.exists()
    (mine / "kept.json").rename(mine / "tokenizer.json")
    assert type(load_tokenizer(describe(mine, trust_remote_code=digest_of(mine)))).__name__ == "Words"
    assert canary.read_text() == "tokenization_mine\n"


@pytest.mark.dist
def test_trusted_code_is_run_recorded_exported_and_never_resumed_by_the_folder_alone(
    made: Path, canary: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way, by the shell, under an engine in which one rank alone reads. A secret is in the name of the data."""
    monkeypatch.setenv("MY_TOKEN", SECRET)
    data = shutil.copy(made / "data.txt", tmp_path / f"{SECRET}.txt")
    model, run, pin = made / "mine", tmp_path / "run", digest_of(made / "mine")
    trust, again = ["--trust-remote-code", pin], ["resume", str(run), "--steps", "3", "--no-save"]
    line = f"train --model {model} --data {data} --run-dir {run} --sharding fsdp --processes 2 --steps 2 --seq-len 32"
    assert cli.main([*line.split(), "--save-every", "1", *trust]) == 0, capfd.readouterr().err
    assert set(canary.read_text().split()) == {"configuration_mine", "modeling_mine"}
    canary.unlink()
    about = json.loads((run / "run.json").read_text())
    assert about["run_config"]["trust_remote_code"] == pin
    assert about["run_config"]["data"].endswith("/[redacted].txt")
    assert not about["data"]["packed"]
    assert [path for path in run.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()] == []
    # What was saved brings its code along, and is as untrusted as what it was made from.
    with pytest.raises(ModelError, match=f"--trust-remote-code {pin}"):
        describe(run / "export")
    assert not canary.exists()
    assert describe(run / "export", trust_remote_code=pin).architecture == "Mine"
    canary.unlink()
    for flags, says in (
        (
            ["--data", str(data)],
            f"a run folder alone cannot allow that. Read the code, and give --trust-remote-code {pin} again",
        ),
        (trust, "it contained a secret. Give --data again"),
    ):
        capfd.readouterr()
        assert cli.main([*again, *flags]) == 2
        assert says in capfd.readouterr().err
    assert not canary.exists()
    assert cli.main([*again, *trust, "--data", str(data)]) == 0, capfd.readouterr().err
    assert [event["step"] for event in atomic_io.read_events(run / "events.jsonl")] == [1, 2, 3]


HUB_SCRIPT = """
import sys
from pathlib import Path
from toolkit.core.errors import ModelError
from toolkit.models import describe, require_weights
for trust in (None, "main", sys.argv[1][:7], "b" * 40, sys.argv[1]):
    try:
        spec = describe("somebody/mine", trust_remote_code=trust)
        print(spec.architecture, spec.commit == sys.argv[1], Path(spec.source).name, len(require_weights(spec)))
    except ModelError as error:
        print("refused:", error)
from transformers.integrations import hub_kernels
print("compiled kernels from the Hub:", hub_kernels._TRANSFORMERS_USE_HUB_KERNELS)
"""


def test_code_on_the_hub_is_trusted_at_a_full_commit(mine: Path, canary: Path, tmp_path: Path) -> None:
    """In the cache as the Hub's library lays it out: files of a commit are links into the repository's blobs.

    Compiled kernels, which transformers would fetch, are not fetched at all.
    """
    commit = "c0ffee" * 6 + "abcd"
    repository = tmp_path / "hub" / "models--somebody--mine"
    snapshot = repository / "snapshots" / commit
    for path in (repository / "blobs", repository / "refs", snapshot):
        path.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for path in mine.iterdir():
        path.rename(repository / "blobs" / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    done = python("-c", HUB_SCRIPT, commit, env=environment(HF_HUB_CACHE=str(tmp_path / "hub")), code=0)
    untrusted, branch, short, absent, trusted, kernels = done.stdout.splitlines()
    assert "(configuration_mine.py, modeling_mine.py), which runs only if you trust it" in untrusted
    assert f"add --trust-remote-code {commit}," in untrusted
    assert "--trust-remote-code main: expected a full commit of 40 digits" in branch
    assert f"--trust-remote-code {commit[:7]}: expected a full commit of 40 digits" in short
    assert f"not in the local cache at commit {'b' * 40}" in absent
    assert trusted == f"Mine True {commit} 1"
    assert kernels == "compiled kernels from the Hub: 0"


KERNEL = """
def get_kernel(*words, **more):
    open("fetched", "w").close()
    raise RuntimeError("fetched")
"""
QUIET = """
import sys
from toolkit.transforms.adapters import import_bitsandbytes
import_bitsandbytes()
import peft
import bitsandbytes.backends.cpu.ops
assert sys.modules.get("kernels", 1) is not None
import kernels
assert kernels.get_kernel
"""


def test_bitsandbytes_brings_no_compiled_kernel_and_says_nothing(tmp_path: Path) -> None:
    """It would on a CPU with AVX512-BF16."""
    (tmp_path / "kernels.py").write_text(KERNEL)
    assert python("-c", QUIET, cwd=tmp_path, code=0).stderr == ""
    assert not (tmp_path / "fetched").exists()


@pytest.mark.parametrize("where", ["attn_implementation", "_attn_implementation", "text_config"])
def test_no_config_brings_a_compiled_kernel(where: str, tmp_path: Path) -> None:
    kernel: Any = "somebody/kernel@main:forward"
    values = {"model_type": "llama", where: {"attn_implementation": kernel} if where == "text_config" else kernel}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=f"attention from '{kernel}' on the Hub.*never run"):
        describe(tmp_path)


def test_a_chat_template_reaches_no_python(tmp_path: Path, made: Path) -> None:
    """transformers runs it in Jinja's sandbox."""
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(made / "mine")
    wanted = f"__import__('pathlib').Path('{tmp_path}/canary').touch()"
    messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    for template in (
        "{{ cycler.__init__.__globals__.os.system('touch " + str(tmp_path / "canary") + "') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        '{{ raise_exception.__globals__["__builtins__"]["eval"]("' + wanted + '") }}',
    ):
        encoder = Encoder(tokenizer=tokenizer, mask_prompts=False, template=template)
        document = Document(kind="messages", content={"messages": messages}, where="chat.jsonl, line 1")
        with pytest.raises(DataError, match=r"chat\.jsonl, line 1: the chat template refuses .*unsafe"):
            list(encoder.encode([document]))
    assert not (tmp_path / "canary").exists()


# Files of others -------------------------------------------------------------------------------------------------------


def _weights(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"a": torch.zeros(2)}, path)


@pytest.mark.parametrize(
    "name", ["../elsewhere.safetensors", "/tmp/elsewhere.safetensors", "sub/elsewhere.safetensors", "elsewhere.bin"]
)
def test_an_index_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    _weights(tmp_path / "elsewhere.safetensors")
    _weights(tmp_path / "model" / "sub" / "elsewhere.safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match=re.escape(f"names {name!r}")):
        local_weights(tmp_path / "model")


def test_links_out_of_a_models_folder_are_refused_and_the_hubs_cache_works(tmp_path: Path) -> None:
    _weights(tmp_path / "elsewhere.safetensors")
    model, index = tmp_path / "model", {"weight_map": {"a": "part.safetensors"}}
    model.mkdir()
    for name, target in (("model.safetensors", "elsewhere.safetensors"), ("part.safetensors", "elsewhere.safetensors")):
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        (model / name).symlink_to(tmp_path / target)
        with pytest.raises(ModelError, match=rf"{name} is a link that leaves its folder, to .*elsewhere"):
            local_weights(model)
        (model / name).unlink()
    (tmp_path / "index.json").write_text(json.dumps(index))
    (model / "model.safetensors.index.json").unlink()
    (model / "model.safetensors.index.json").symlink_to(tmp_path / "index.json")
    with pytest.raises(ModelError, match=r"index\.json is a link that leaves its folder"):
        local_weights(model)

    repository = tmp_path / "models--somebody--mine"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    _weights(repository / "blobs" / "0a0b")
    (snapshot / "part.safetensors").symlink_to("../../blobs/0a0b")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert local_weights(snapshot) == [snapshot / "part.safetensors"]
    (snapshot / "part.safetensors").unlink()
    (snapshot / "part.safetensors").symlink_to("../../../elsewhere.safetensors")
    with pytest.raises(ModelError, match="leaves its folder"):
        local_weights(snapshot)


def test_an_adapter_beside_a_models_weights_is_refused(made: Path, tmp_path: Path) -> None:
    """transformers would put it onto the model, read from a pickle too."""
    shutil.copytree(made / "mine", tmp_path / "model")
    for path in (tmp_path / "model").glob("*.py"):
        path.unlink()
    _change(tmp_path / "model" / "config.json", model_type="llama", architectures=["LlamaForCausalLM"], auto_map=None)
    spec = describe(tmp_path / "model")
    assert len(require_weights(spec)) == 1
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        require_weights(spec)


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/tmp/x.safetensors",
        "a/../../x.safetensors",
        "..\\x.safetensors",
        "",
        "x.pkl",
        "manifest.json",
    ],
)
def test_a_manifest_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    """Though its own sha256 holds: whoever writes a manifest can compute it."""
    changed = runs.manifest(files={name: {"sha256": "0" * 64, "bytes": 1}})
    (tmp_path / "manifest.json").write_bytes(changed.encode())
    with pytest.raises(CheckpointError, match=re.escape(repr(name))):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "name", ["lock", "events.jsonl", "run.json", "accelerate.yaml", "export", "logs", "logs/rank-0.log", "checkpoints",
             "checkpoints/step-00000001"]
)  # fmt: skip
@pytest.mark.parametrize("dangling", [False, True])
def test_a_run_writes_through_no_link(name: str, dangling: bool, tmp_path: Path) -> None:
    """A stranger's folder may hold links to files of ours: none is emptied, changed or made."""
    run, ours = tmp_path / "run", tmp_path / "ours"
    for part in ("logs", "checkpoints"):
        (run / part).mkdir(parents=True)
    (run / "run.json").write_text("{}")
    path = run / name
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.symlink_to(ours)
    if not dangling:
        ours.write_text("canary")
    with pytest.raises(RunError, match=rf"{path.name} is a link that leads out|holds no run"):
        folder.enter(run, resume=True)
    assert ours.exists() != dangling
    assert dangling or ours.read_text() == "canary"


def test_a_link_inside_a_run_is_none_of_that(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    (tmp_path / "named").symlink_to(run)
    (run / "latest").symlink_to("run.json")
    folder.enter(tmp_path / "named", resume=True).leave()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ranks": "2"}, "ranks is 2, expected int"),
        ({"ranks": "1\ntoolkit: all is well"}, r"ranks is 1\\ntoolkit: all is well, expected int"),
        ({"ranks": True}, "ranks is True, expected int"),
        ({"ranks": 0}, "ranks is 0, expected 1 to"),
        ({"run_config": []}, "run_config is list, expected dict"),
        ({"run_config": {"workers": "2"}}, "workers '2': expected int"),
        ({"run_config": {"data": ["/etc/passwd"]}}, r"data \['/etc/passwd'\]: expected str"),
        ({"run_config": {"run": "x"}}, "no field 'run'"),
        ({"run_config": {"model": None}}, "model None: expected str"),
        ({"strategy": {"sharding": 1}}, "sharding 1 is unknown"),
        ({"train_config": {"steps": True}}, "steps True: expected int"),
        ({"run_config": {"trust_remote_code": "a" * 40}}, f"give --trust-remote-code {'a' * 40} again"),
        (
            {"run_config": {"data": "https://[redacted]@host/x.jsonl"}},
            "run.json has no full value of data.*Give --data again",
        ),
    ],
)
def test_a_strangers_run_json_says_no_more_than_flags_could(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    about = {"strategy": {}, "train_config": {}, "run_config": {}, "ranks": 1, **changes}
    (tmp_path / "run.json").write_text(json.dumps(about))

    def read() -> None:
        _, _, fields = merge_config(read_run_json(tmp_path), {}, {}, {}, 1)
        from_dict(Strategy, fields)

    with pytest.raises((RunError, StrategyError), match=says):
        read()


def test_every_promise_names_tests_that_exist() -> None:
    """SECURITY.md tells how each promise is tested."""
    page = (ROOT / "SECURITY.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`", page)
    assert len(named) > 10
    for file, test in named:
        name = test or r"test_\w+"
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{test}"
