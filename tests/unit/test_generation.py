"""`toolkit generate`: the words of a saved model are those of transformers alone, and what cannot be is refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs
import tiny
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import toolkit as tk
from toolkit import cli
from toolkit.core.errors import ModelError, RunError
from toolkit.core.units import timestamp
from toolkit.exporters.generation import encode
from toolkit.models import describe
from toolkit.models.hf_loading import load_tokenizer

TEMPLATE = "{% for m in messages %}<user> {{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a saved model and a chat template, one with an adapter over it, and one with nothing yet."""
    root = tmp_path_factory.mktemp("generation")
    for name in ("whole", "adapter", "unsaved"):
        fields = {"model": str(root / "whole" / "export"), "data": "embedded"}
        record = runs.about(tk.RunConfig(**fields), finished=timestamp())
        record["strategy"] |= {"adapter": "lora" if name == "adapter" else "none", "precision": "fp32"}
        runs.write(root / name, [], record=record)
    base = tiny.llama(root / "whole" / "export", max_position_embeddings=64)
    # Many published models sample by default, and end at a token of their own.
    (base / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.6, "top_k": 20, "eos_token_id": 77}'
    )
    tiny.save_tokenizer(base, "<user>", "<assistant>", words=245, pad_token="<pad>", eos_token="</s>")
    (base / "chat_template.jinja").write_text(TEMPLATE)
    torch.manual_seed(1)
    options = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**options))
    model.save_pretrained(root / "adapter" / "export")
    return root


def plain(root: Path, prompt: str, *, adapter: bool = False, **options: Any) -> str:
    """As anybody would: nothing of ours."""
    base = root / "whole" / "export"
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    if adapter:
        model = PeftModel.from_pretrained(model, root / "adapter" / "export")
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    ends = {"eos_token_id": [77, tokenizer.eos_token_id], "do_sample": False}
    tokens = model.generate(**inputs, **{"max_new_tokens": 12, **ends, **options})
    return str(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_the_answer_is_that_of_transformers_alone(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = "<user> w1 w2</s><assistant> "
    expected, adapted, raw = plain(root, chat), plain(root, chat, adapter=True), plain(root, "w1 w2")
    assert len({expected, adapted, raw}) == 3
    for source in (root / "whole", root / "whole" / "export"):
        assert tk.generate(source, "w1 w2", max_new_tokens=12) == expected
        assert capsys.readouterr().out == expected + "\n", "it is streamed"
    for source in (root / "adapter", root / "adapter" / "export"):
        assert tk.generate(source, "w1 w2", max_new_tokens=12, stream=False) == adapted
    assert tk.generate(root / "whole", "w1 w2", max_new_tokens=12, chat_template=False, stream=False) == raw
    assert capsys.readouterr().out == ""
    # By default up to the model's last position.
    assert tk.generate(root / "whole", "w1 w2", stream=False) == plain(root, chat, max_new_tokens=59)
    torch.manual_seed(0)
    drawn = {tk.generate(root / "whole", "w1 w2", temperature=5.0, max_new_tokens=8, stream=False) for _ in range(3)}
    assert len(drawn) > 1


def test_the_command_prints_the_answer_alone(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(root / "whole"), "w1", "w2", "--max-new-tokens", "12"]
    expected = tk.generate(root / "whole", "w1 w2", max_new_tokens=12, stream=False)
    assert cli.main(words) == 0
    assert capsys.readouterr().out == expected + "\n"
    assert cli.main([*words, "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == {"source": str(root / "whole"), "prompt": "w1 w2", "text": expected}


def test_an_adapter_of_others_names_its_base(root: Path, tmp_path: Path) -> None:
    folder = root / "adapter" / "export"
    about = json.loads((folder / "adapter_config.json").read_text())
    moved = tmp_path / "adapter"
    moved.mkdir()
    (moved / "adapter_model.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
    (moved / "adapter_config.json").write_text(json.dumps(about))
    expected = tk.generate(root / "adapter", "w1", max_new_tokens=4, stream=False)
    assert tk.generate(moved, "w1", max_new_tokens=4, stream=False) == expected
    (moved / "adapter_config.json").write_text(json.dumps({**about, "base_model_name_or_path": "some/base"}))
    with pytest.raises(
        ModelError, match=r"adapter over 'some/base', which is not on this machine. Give its .* --model"
    ):
        tk.generate(moved, "w1")
    base = str(root / "whole" / "export")
    assert tk.generate(moved, "w1", max_new_tokens=4, model=base, stream=False) == expected
    (moved / "adapter_model.safetensors").rename(moved / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"cannot be opened: it has no adapter_model.safetensors"):
        tk.generate(moved, "w1", model=base)


@pytest.mark.parametrize(
    ("source", "prompt", "options", "message"),
    [
        ("whole", " ", {}, "prompt ' ': expected text"),
        ("whole", "w1", {"temperature": -1.0}, "temperature -1.0: expected a finite number from 0 on"),
        ("whole", "w1", {"temperature": float("nan")}, "temperature nan: expected"),
        ("whole", "w1", {"max_new_tokens": 0}, "max_new_tokens 0: expected at least 1"),
        ("whole", "w1", {"max_new_tokens": 62}, r"has 4 tokens, and 62 more are to follow\..* at most 64"),
        ("whole", "w1 " * 64, {}, r"has 67 tokens, and 1 more"),
        ("whole", "w1", {"model": "embedded"}, "is for an adapter, and .*whole is none"),
        ("unsaved", "w1", {}, r"has no saved model.* `toolkit export .*unsaved -o FOLDER`"),
        ("nothing", "w1", {}, r"nothing: there is no such run or folder\. `toolkit runs`"),
    ],
)
def test_what_cannot_be_is_refused(root: Path, source: str, prompt: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(tk.ToolkitError, match=message):
        tk.generate(root / source, prompt, **options)


def test_a_run_with_a_best_model_names_it(root: Path) -> None:
    best = root / "unsaved" / "best"
    best.mkdir()
    with pytest.raises(RunError, match=f"Or give {best}"):
        tk.generate(root / "unsaved", "w1")


def test_a_prompt_is_read_as_in_a_training(root: Path) -> None:
    spec = describe(root / "whole" / "export")
    tokenizer = load_tokenizer(spec)
    tokenizer.chat_template = "{{ raise_exception('system first') }}"
    with pytest.raises(ModelError, match="the chat template refuses the prompt: system first"):
        encode(tokenizer, spec, "w1")
    ids, _ = encode(tokenizer, spec, "w1 </s>", chat=False)
    assert tokenizer.decode(ids) == "w1", "a tokenizer may close a text, and this one goes on"
