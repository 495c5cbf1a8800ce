"""In the manner of Accelerate's `gradient_accumulation_for_autoregressive_models.py`: a mean over tokens, `no_sync` by hand."""

import contextlib

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, get_constant_schedule, set_seed

ACCUMULATION = 3
MAX_GRAD_NORM = 0.5


def texts(count):
    """Rows that end at different places."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 250, (count, 16), generator=draw)
    ends = torch.randint(4, 16, (count, 1), generator=draw)
    return [
        {"input_ids": row, "labels": torch.where(torch.arange(16) < end, row, -100)}
        for row, end in zip(ids, ends, strict=True)
    ]


def main(folder, batch_size):
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION)
    set_seed(42)
    train_dataloader = torch.utils.data.DataLoader(texts(32), shuffle=False, batch_size=batch_size)
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-3)
    lr_scheduler = get_constant_schedule(optimizer=optimizer)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    history = []
    model.train()
    iterator = iter(train_dataloader)
    left = len(train_dataloader)
    while left:
        samples = [next(iterator) for _ in range(min(ACCUMULATION, left))]
        left -= len(samples)
        local = sum((batch["labels"][:, 1:] != -100).sum() for batch in samples)
        num_items_in_batch = accelerator.gather(local).sum().item()
        losses = []
        for i, batch in enumerate(samples):
            ctx = model.no_sync if (i < len(samples) - 1 and accelerator.num_processes > 1) else contextlib.nullcontext
            with ctx():
                loss = model(**batch, use_cache=False, num_items_in_batch=num_items_in_batch).loss
                # Engines average over the ranks, Accelerate over the micro-batches, and the loss is a mean over all already.
                accelerator.backward(loss * ACCUMULATION * accelerator.num_processes)
                losses.append(loss.detach())
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        history += [accelerator.gather(sum(losses)).sum().item(), float(grad_norm)]
    accelerator.end_training()
    return history
