"""The commands of the site, README and AGENTS.md; which of them `make test` executes, and why it only parses the others.

`make grid` executes these, too, where one machine can (`test_site_commands_dist.py`).
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import results
import tiny
from programs import ROOT

DOCS = ROOT / "docs"
TEXTS = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md"))]

EXECUTED = """
toolkit forecast --sharding zero3 --hardware "2x cpu"
toolkit forecast --sharding zero3 --hardware "2x cpu" --json -
toolkit forecast --hardware "2x cpu" --sharding fsdp --seq-len 1024 --micro-batch 1
toolkit forecast --hardware "2x cpu" --sharding fsdp --seq-len 1024 --micro-batch 1 --against loss=chunked
toolkit forecast ./my-model --sharding zero3 --hardware "8x H100-80GB" --json -
toolkit forecast Qwen/Qwen3-8B --sharding zero3 --hardware "8x H100-80GB" --seq-len 4096 --micro-batch 1
toolkit forecast Qwen/Qwen3-8B --hardware T4 --adapter qlora --seq-len 1024 --micro-batch 1
toolkit forecast Qwen/Qwen3-0.6B --hardware "1x H100-80GB" --seq-len 32768 --micro-batch 1 --loss chunked --against mlp_tiles=auto,activation_offload=true
toolkit plan --hardware "2x cpu" --global-batch 8
toolkit plan ./my-model --hardware "8x H100-80GB" --global-batch 64 --json -
toolkit plan Qwen/Qwen3-8B --hardware "8x H100-80GB" --global-batch 64 --seq-len 4096
toolkit plan Qwen/Qwen3-8B --hardware "8x H100-80GB" --global-batch 64 --seq-len 4096 --write accelerate.yaml
toolkit plan Qwen/Qwen3-8B --hardware "any x H100-80GB" --adapter any --tokens 2e9 --price 2.5
toolkit plan Qwen/Qwen3-8B --hardware "2 nodes x 8x H100-80GB" --global-batch 128 --seq-len 4096
toolkit timeline --sharding zero3 --hardware "2x cpu"
toolkit precisions --hardware "2x cpu"
toolkit describe ./my-model
toolkit describe Qwen/Qwen3-0.6B
toolkit preview ./my-model chat.jsonl
toolkit preview embedded embedded
toolkit runs
toolkit config --sharding fsdp --processes 16 --nodes 2 --node-rank 0 --main-address 10.0.0.1:29500 -o node0.yaml
toolkit config --sharding fsdp --processes 16 --nodes 2 --node-rank 1 --main-address 10.0.0.1:29500 -o node1.yaml
""".strip().splitlines()  # noqa: E501
"""As they stand, in the tests' process and in the folder that `make_reader_folder` writes."""

OF_A_RUN = """
toolkit train --model ./my-model --data notes/ --sharding fsdp --processes 2
toolkit runs
toolkit stop runs/NAME
toolkit resume runs/NAME
toolkit watch runs/NAME
toolkit resume runs/NAME --sharding fsdp --processes 2
toolkit report runs/NAME
toolkit export runs/NAME -o my-model-trained
toolkit generate runs/NAME "a prompt"
""".strip().splitlines()
"""In this order by `test_site_commands_dist.py`, with the run's name in place of NAME."""

PARSED = {
    "It needs GPUs, or more ranks than a test has.": """
toolkit train --model Qwen/Qwen3-0.6B --data chat.jsonl --sharding zero3 --processes 8 --precision bf16
toolkit train --model ./my-model --data chat.jsonl --sharding zero3 --processes 8
toolkit train --model ./my-model --data notes/ --sharding zero3 --processes 4 --save-every 200 --restarts 3
""",
    "It needs two machines.": """
accelerate launch --config_file node0.yaml -m toolkit.finetune --model ./my-model --data notes/
""",
    "It installs or builds for minutes. `make test` comes after it, and tests/unit/test_release.py builds and installs.": """
python3 -m venv .venv && source .venv/bin/activate
pip install -c constraints.txt ".[all]"
make check
make docs
make test PYTEST="tests/unit -k strategy"
""",
    "It trains the embedded model for most of a minute. tests/dist/test_compare.py runs `compare`.": """
toolkit train --sharding ddp --processes 2 --steps 20
toolkit train --sharding fsdp --processes 2 --steps 20
toolkit compare --sharding ddp,zero2,fsdp --processes 2 --steps 20
""",
    "It examines the machine for ten seconds. tests/unit/test_diagnosis.py does, and checks what it prints.": """
toolkit doctor
toolkit doctor --json -
""",
    "tests/dist/test_guard_dist.py runs `guard`.": """
toolkit guard --sharding fsdp --cp 2
""",
    "tests/dist/test_rehearsal_dist.py runs `rehearse`.": """
toolkit rehearse --ranks 64 --rank 37 --sharding fsdp --seq-len 256 --micro-batch 1
toolkit rehearse --ranks 64 --rank 63 --sharding fsdp --pp 4 --seq-len 256 --micro-batch 1 --accumulation 4
""",
    "tests/dist/test_context_parallel_dist.py trains with `cp`.": """
toolkit train --processes 2 --sharding fsdp --cp 2 --seq-len 512 --micro-batch 1 --steps 2
""",
    "tests/dist/test_exporting_dist.py trains adapters, and tests `merge`.": """
toolkit train --model ./my-model --data notes/ --adapter lora --sharding ddp --processes 2
toolkit train --model ./my-model --data notes/ --adapter qlora --sharding fsdp --processes 2
toolkit export runs/NAME -o my-model-merged --merge
""",
    "tests/unit/test_data_inputs.py reads such files with `columns`.": """
toolkit train --data questions.csv --columns prompt=question,completion=answer
toolkit train --data a.jsonl --data b.parquet:0.3
""",
    "It evaluates every 100 steps: minutes. tests/dist/test_supervision.py does so with `eval_data` of a few.": """
toolkit train --model ./my-model --data chat.jsonl --eval-data held_out.jsonl --eval-every 100 --save-best --early-stop 3
""",
    "tests/dist/test_users_paths_dist.py runs scripts of others by `launch`, and under our config files.": """
toolkit launch --sharding zero3 --processes 2 script.py --its-own flags
accelerate launch --config_file accelerate_configs/zero3.yaml script.py
accelerate launch --config_file accelerate_configs/zero3.yaml -m toolkit.finetune --steps 20
""",
}
"""Why a command is not executed → such commands. Their flags and values are parsed."""

CHATS = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4"}]
TEMPLATE = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"


def commands() -> list[str]:
    """Every command line in a fenced block of bash."""
    found: dict[str, None] = {}
    for path in TEXTS:
        for block in re.findall(r"^```bash\n(.*?)^```", path.read_text(), re.S | re.M):
            lines = block.replace("\\\n", " ").splitlines()
            found |= dict.fromkeys(line.partition("  #")[0].strip() for line in lines)
    return [line for line in found if line]


def words_of(line: str, run: str = "NAME") -> list[str]:
    """The words after `toolkit`, of a run with this name."""
    return shlex.split(line.replace("runs/NAME", f"runs/{run}"))[1:]


def make_reader_folder(folder: Path, words: int = 60_000) -> None:
    """Write what a reader of the site has: a model, notes of so many words, chats. Of the Hub's models there are configs alone."""
    for name, shape in (("Qwen3-8B", "8B (Qwen3)"), ("Qwen3-0.6B", "0.6B (Qwen3)")):
        (folder / "Qwen" / name).mkdir(parents=True)
        (folder / "Qwen" / name / "config.json").write_text(json.dumps(results.MODELS[shape]))
    tiny.llama(folder / "my-model")
    (folder / "my-model" / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "chat.jsonl").write_text((json.dumps({"messages": CHATS}) + "\n") * 9)
    (folder / "notes").mkdir()
    (folder / "notes" / "words.txt").write_text(
        " ".join(f"w{(7 * number + number // 5) % 240}" for number in range(words))
    )
