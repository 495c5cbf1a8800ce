"""In the manner of Accelerate's `examples/by_feature/checkpointing.py`: `save_state`, `load_state`, a resumed epoch."""

import os

import torch
from accelerate import Accelerator
from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup, set_seed


def pairs(count, seed):
    """Rows of tokens; the label says whether the first one is a small number."""
    ids = torch.randint(3, 250, (count, 16), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": (row[0] < 100).long()} for row in ids]


def main(folder, batch_size, output_dir, resume_from_checkpoint=None, epochs=2, checkpointing_steps=4):
    accelerator = Accelerator()
    set_seed(42 if resume_from_checkpoint is None else 7)
    train_dataloader = torch.utils.data.DataLoader(pairs(24, 1), shuffle=True, batch_size=batch_size)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-3)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer=optimizer, num_warmup_steps=2, num_training_steps=6)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    overall_step, starting_epoch, resume_step = 0, 0, None
    if resume_from_checkpoint is not None:
        accelerator.load_state(resume_from_checkpoint)
        name = os.path.basename(resume_from_checkpoint)
        resume_step = int(name.removeprefix("step_"))
        starting_epoch = resume_step // len(train_dataloader)
        resume_step -= starting_epoch * len(train_dataloader)
        overall_step = resume_step
    losses = []
    for epoch in range(starting_epoch, epochs):
        model.train()
        if resume_from_checkpoint is not None and epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        else:
            active_dataloader = train_dataloader
        for batch in active_dataloader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            losses.append(accelerator.gather(loss.detach()).mean().item())
            if overall_step == checkpointing_steps and resume_from_checkpoint is None:
                accelerator.save_state(os.path.join(output_dir, f"step_{overall_step}"))
    accelerator.end_training()
    return losses
