"""The embedded text, its tokenizer, and the embedded model with them: used where none are named. Nothing is downloaded."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import sysconfig
import tempfile
from pathlib import Path

from toolkit.config.run_config import EMBEDDED
from toolkit.core.cache import cache_folder
from toolkit.core.errors import DataError
from toolkit.models import ModelSpec, describe
from toolkit.models.resolution import embedded_checkpoint

TEXT_BYTES = 4_000_000
"""The embedded text is the first files, by name, that reach this size."""

EMBEDDED_VOCABULARY = 4096
"""Tokens of the embedded tokenizer, special ones included."""

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
"""The embedded tokenizer's special tokens, ids 0, 1 and 2 (1 and 2 are Llama's own defaults)."""

_SKIPPED = {
    "__pycache__", "ensurepip", "idlelib", "lib2to3", "site-packages", "dist-packages", "test", "tests", "turtledemo",
}  # fmt: skip
_TRAINED_FRACTION = 4


def embedded_files() -> list[Path]:
    """Return the Python standard library's sources, sorted by name, about 4 MB; equal for each Python version.

    Raises:
        DataError: where this Python comes without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        # `_sysconfigdata` holds paths of the machine that built this Python, so it differs between machines.
        files += [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith("_sysconfigdata")]
    chosen: list[Path] = []
    total = 0
    for path in sorted(files, key=lambda path: path.relative_to(root).as_posix()):
        if total < TEXT_BYTES and (size := path.stat().st_size):
            chosen.append(path)
            total += size
    if total < TEXT_BYTES:
        problem = f"{root} holds {total:,} bytes of Python sources, expected at least {TEXT_BYTES:,}"
        raise DataError(f"the embedded text: {problem}. Name a text with --data.")
    return chosen


def embedded_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE of 4,096 tokens on a quarter of the embedded files and save it in `folder`.

    The same Python and libraries give the same bytes. Takes a second or two.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    texts = (path.read_text(encoding="utf-8") for path in embedded_files()[::_TRAINED_FRACTION])
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=EMBEDDED_VOCABULARY,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=PAD, bos_token=BOS, eos_token=EOS)
    tokenizer.save_pretrained(folder)


def resolve_spec(model: str, trust_remote_code: str | None = None) -> ModelSpec:
    """Return the model's spec. The embedded model is made first, once for this machine."""
    if model != EMBEDDED:
        return describe(model, trust_remote_code=trust_remote_code)
    return dataclasses.replace(describe(None, trust_remote_code=trust_remote_code), source=str(embedded_model()))


def embedded_model() -> Path:
    """Return the folder of the embedded model and its tokenizer, made once from a seed."""
    from importlib import metadata

    from filelock import FileLock

    # The tokenizer depends on this Python's sources, the weights on this torch's generator.
    made_with = [sys.version, *(metadata.version(name) for name in ("torch", "transformers", "tokenizers"))]
    root = cache_folder("embedded")
    folder = root / hashlib.sha256(repr(made_with).encode()).hexdigest()[:16]
    with FileLock(root / f"{folder.name}.lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=root) as work:
                draft = Path(work, "model")
                embedded_checkpoint(draft)
                embedded_tokenizer(draft)
                draft.rename(folder)
    return folder
