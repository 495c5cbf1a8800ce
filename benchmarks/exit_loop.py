"""A training script in the manner of Accelerate's examples. Its last calls are collectives.

python exit_loop.py end_training | nothing [EXIT CODE]
"""

import sys
from types import SimpleNamespace

import torch

import toolkit as tk

STEPS, WIDTH = 3, 16


def training_function(ending: str) -> None:
    """Train a few steps, gather what an example gathers, and end."""
    accelerator = tk.accelerator(None, tk.TrainConfig(micro_batch=2))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, 1))
    model.config = SimpleNamespace(hidden_size=WIDTH)  # type: ignore[assignment]  # Accelerate derives DeepSpeed's bucket sizes from it
    data = torch.utils.data.TensorDataset(torch.randn(2 * STEPS * accelerator.num_processes, WIDTH))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            items = accelerator.gather(torch.tensor([batch.numel()], device=accelerator.device)).sum()
            loss = model(batch).square().sum() / items
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean())
    for size in (1, 1000, 100_000):
        gathered = accelerator.gather_for_metrics(torch.full((size,), float(accelerator.process_index)))
        total = accelerator.reduce(torch.ones(size, device=accelerator.device))
    accelerator.print(f"trained: {len(losses)} steps, {gathered.numel()} gathered, {total.numel()} reduced")
    if ending == "end_training":
        accelerator.end_training()


if __name__ == "__main__":
    training_function(sys.argv[1])
    if sys.argv[2:]:
        sys.exit(int(sys.argv[2]))
