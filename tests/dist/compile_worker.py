"""Cells with and without `compile`: losses of a few steps and an evaluation, and what dynamo counted after each."""

from __future__ import annotations

import io
import os
import sys
from functools import partialmethod
from typing import Any

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # processes of its own would outlive a rank's end

import ranks

STEPS = 4


def run(cell: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train on rows of one shape that hold other documents in each step: packed, or padded. Then evaluate a shorter batch."""
    import torch
    import torch._dynamo
    from torch._dynamo.utils import counters

    import toolkit as tk
    from toolkit.config.train_config import TrainConfig

    torch._dynamo.reset()
    counters.clear()
    packed, backend = cell.pop("packed"), cell.pop("backend", "aot_eager")
    # The graphs are the same; compiling them in C++ takes 10 s each.
    torch.nn.Module.compile = partialmethod(COMPILE, backend=backend)  # type: ignore[assignment]
    count, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    ours, _, _ = ranks.build(folder, TrainConfig(steps=STEPS, lr=1e-3, micro_batch=8 // count, seq_len=32), **cell)
    said = io.StringIO()
    ours.accelerator.print = lambda *lines: print(*lines, file=said)
    losses, graphs = [], []

    def loss_of(step: int, rows: int = 8) -> Any:
        ids = torch.randint(3, 250, (rows, 32), generator=torch.Generator().manual_seed(step))[rank::count].contiguous()
        batch = {"input_ids": ids, "labels": ids}
        if packed:
            first = 8 + 3 * step
            batch["position_ids"] = torch.cat([torch.arange(first), torch.arange(32 - first)]).expand(len(ids), 32)
        else:
            batch["attention_mask"] = (torch.arange(32) < 20 + 3 * step).long().expand(len(ids), 32)
        return tk.loss(ours.model, batch)

    def keep(loss: Any) -> None:
        losses.append(float(ours.accelerator.gather(loss.detach().reshape(1)).mean()))
        graphs.append(counters["stats"]["unique_graphs"])

    for step in range(STEPS):
        loss = loss_of(step)
        ours.job.engine.backward(ours, loss, True)
        ours.job.engine.step(ours)
        keep(loss)
    ours.model.eval()
    with torch.no_grad():
        keep(loss_of(STEPS - 1, rows=4))
    names = sorted(name for name, _ in ours.accelerator.unwrap_model(ours.model).named_parameters())
    return {
        "losses": losses,
        "graphs": graphs,
        "breaks": list(counters["graph_break"]),
        "said": said.getvalue(),
        "names": names,
    }


if __name__ == "__main__":
    import torch

    COMPILE = torch.nn.Module.compile
    ranks.main(run, *sys.argv[1:])
