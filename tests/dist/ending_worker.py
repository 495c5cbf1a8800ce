"""A rank that prepares a model for DDP on gloo, takes a step, and ends: over and over."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from toolkit.runtime import end


def once() -> None:
    """All that DDP and its process group hold goes as this returns."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(64, 64))
    accelerator.backward(model(torch.ones(2, 64)).sum())
    accelerator.reduce(torch.ones(1000))
    end(accelerator)


for _ in range(int(sys.argv[1])):
    once()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)  # the last one is not free at once
    AcceleratorState._reset_state(reset_partial_state=True)
