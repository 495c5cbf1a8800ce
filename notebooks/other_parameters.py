"""Other values of the notebooks' parameters, so that nothing in a notebook is true for its own alone. Few steps: two are enough."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from execute import RUNS, execute, read
from nbformat import NotebookNode

PARAMETERS: dict[str, dict[str, Any]] = {
    "03_load_a_large_model": {
        "WIDTH": 128, "LAYERS": 3, "SEQ_LEN": 64, "MICRO_BATCH": 2, "STEPS": 2, "LENGTHS": [256, 512], "NEW_TOKENS": 4,
    },
    "02_where_the_memory_goes": {
        "WIDTH": 128, "LAYERS": 3, "SEQ_LEN": 96, "BATCHES": [2, 4], "VOCABULARIES": [4096, 5120], "STEPS": 2, "GPUS": 32,
        "CRASH_ROWS": 256,
    },
    "05_precision": {"STEPS": 2, "SHARDINGS": "fsdp", "STAGES": "zero3", "SCALE": 2.0**20, "TOKENS": 80},
    "06_zero_and_fsdp": {
        "STEPS": 2, "SHARDINGS": "zero2,fsdp_grad_op", "ACCUMULATION": 3, "WORDS": "fsdp", "PUBLISHED": "RTX-3090",
    },
    "07_lora_and_qlora": {
        "WIDTH": 192, "BASE_STEPS": 4, "STEPS": 2, "RANK": 4, "SEQ_LEN": 64, "MICRO_BATCH": 2, "SHARDED": "zero3",
    },
    "08_beyond_data_parallel": {
        "STEPS": 4, "MICRO_BATCHES": 4, "SEQ_LEN": 64, "EXPERTS": 4, "EXPERT_STEPS": 2, "CARD": "H100-80GB",
        "VOCABULARY": 200_000,
    },
    "04_activations": {"WIDTH": 64, "TOKENS": 64, "DEPTHS": (4, 9), "REPEATS": 1, "STEPS": 2, "SEQ_LEN": 128},
    "01_first_run": {"STEPS": 60, "SEQ_LEN": 64, "CARD": "L4"},
}  # fmt: skip
"""What replaces a notebook's own values."""

AGAIN: dict[str, dict[str, Any]] = {
    "01_first_run": {"MICRO_BATCH": 2, "CARD": "A10G"},
    "02_where_the_memory_goes": {"BATCHES": [1, 4], "GPUS": 16},
    "03_load_a_large_model": {"SEQ_LEN": 96, "NEW_TOKENS": 3},
    "04_activations": {"TOKENS": 96, "MICRO_BATCH": 4},
    "05_precision": {"STEPS": 3, "SCALE": 2.0**22},
    "06_zero_and_fsdp": {"ACCUMULATION": 2, "PUBLISHED": "TITAN-RTX"},
    "07_lora_and_qlora": {"STEPS": 3, "RANK": 2, "SHARDED": "fsdp"},
    "08_beyond_data_parallel": {"STEPS": 5, "EXPERTS": 6},
}
"""What replaces them when all cells run a second time, in the folder of the first."""

CORE = ("01_first_run",)
"""Notebooks that need the core's libraries alone, and those that show a notebook."""
OPTIONAL = ("deepspeed", "bitsandbytes")
"""Libraries of other extras."""

SECONDS = 600
"""Guard against a kernel that hangs: several times what the longest notebook takes on an idle machine."""


def execute_with_others(source: Path, folder: Path, times: int) -> Iterator[NotebookNode]:
    """Execute a notebook `times` times in one folder, with `PARAMETERS`, then with `AGAIN`, too. Yield what was executed.

    Raises:
        AssertionError: where it leaves files beside its runs. What `execute` raises, where a cell or a claim fails.
    """
    with tempfile.TemporaryDirectory() as hides:
        blocked = dict.fromkeys(OPTIONAL if source.stem in CORE else ())
        Path(hides, "sitecustomize.py").write_text(f"import sys\nsys.modules.update({blocked!r})\n")
        for others in ({}, AGAIN[source.stem])[:times]:
            notebook = read(source, {**PARAMETERS[source.stem], **others})
            execute(notebook, folder, limit=SECONDS, path=[Path(hides)])
            yield notebook
    assert {path.name for path in folder.iterdir()} - {".ipython", ".kernel.json"} == {RUNS}
