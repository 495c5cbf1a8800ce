"""One process group, many cells: each loads, prepares and trains three steps, and says what came of it."""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any


def reset() -> None:
    """Forget the last cell's Accelerator, so that the next one is made as in a new process."""
    import torch
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING", "ACCELERATE_MIXED_PRECISION"):
        os.environ.pop(name, None)
    torch.set_default_dtype(torch.float32)
    gc.collect()


def run(words: dict[str, Any], folder: str) -> dict[str, Any]:
    """Three steps of one cell, or the sentence that refuses it."""
    import torch

    from toolkit.engines.job import Prepared, engine_of
    from toolkit.errors import StrategyError
    from toolkit.loading import load
    from toolkit.model import describe
    from toolkit.preparing import prepare
    from toolkit.runtime import accelerator as make
    from toolkit.runtime import job as job_of
    from toolkit.strategy import Loop, Strategy

    spec = describe(folder)
    options = {name: words.pop(name) for name in ("steps", "allow_unquantized") if name in words}
    steps = options.get("steps", 3)
    try:
        accelerator = make(Strategy(**words), Loop(steps=steps, micro_batch=2, seq_len=16), spec)
    except StrategyError as error:
        return {"refused": str(error)}
    job = job_of(accelerator)
    engine = engine_of(job.strategy)
    said: list[str] = []
    accelerator.print = lambda *lines: said.extend(map(str, lines))  # type: ignore[method-assign]
    model, _ = load(accelerator, allow_unquantized=options.get("allow_unquantized", False))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    trainable = {name: str(p.dtype) for name, p in model.named_parameters() if p.requires_grad}
    model, optimizer = prepare(accelerator, model, optimizer)
    prepared = Prepared(job, model, optimizer, accelerator)
    generator = torch.Generator().manual_seed(7)
    batch = torch.randint(3, spec.vocab, (8, 16), generator=generator)
    mine = batch[accelerator.process_index % 4 :: 4].contiguous().to(accelerator.device)
    losses, norms = [], []
    for _ in range(steps):
        loss = model(input_ids=mine, labels=mine).loss
        engine.backward(prepared, loss, True)
        norms.append(engine.update(prepared).norm)
        losses.append(float(accelerator.gather(loss.detach().float().reshape(1)).mean()))
    held, expected = engine.audit(prepared), engine.account(job)
    return {
        "engine": type(model).__name__,
        "losses": losses,
        "norms": norms,
        "said": said,
        "dtypes": sorted(set(trainable.values())),
        "held": {**held.to_dict(), "dtypes": dict(held.dtypes)},
        "expected": {**expected.to_dict(), "dtypes": dict(expected.dtypes)},
    }


def main(cells: str, folder: str, out: str) -> None:
    """Run every cell of a JSON file; rank 0 writes what each gave into another."""
    import time
    import traceback

    found = []
    with open(cells, encoding="utf-8") as file:
        asked = json.load(file)
    for words in asked:
        reset()
        begin = time.perf_counter()
        try:
            got = run(dict(words), folder)
        except Exception:  # the test shows it; the other cells run on
            traceback.print_exc()
            got = {"error": traceback.format_exc()}
        found.append({"cell": words, "seconds": time.perf_counter() - begin, **got})
        if int(os.environ.get("RANK", "0")) == 0:
            with open(out, "w", encoding="utf-8") as file:
                json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
