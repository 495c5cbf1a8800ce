"""In the manner of Accelerate's `examples/by_feature/gradient_accumulation.py`: `accumulate`, warm-up and cosine, an evaluation."""

import torch
from accelerate import Accelerator
from transformers import AutoModelForSequenceClassification, get_cosine_schedule_with_warmup, set_seed

ACCUMULATION = 2


def pairs(count, seed):
    """Rows of tokens; the label says whether the first one is a small number."""
    ids = torch.randint(3, 250, (count, 16), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": (row[0] < 100).long()} for row in ids]


def main(folder, batch_size, epochs=2):
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION)
    set_seed(42)
    train_dataloader = torch.utils.data.DataLoader(pairs(48, 1), shuffle=True, batch_size=batch_size)
    eval_dataloader = torch.utils.data.DataLoader(pairs(14, 2), batch_size=batch_size)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model = model.to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-3)
    lr_scheduler = get_cosine_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=2,
        num_training_steps=(len(train_dataloader) * epochs) // ACCUMULATION,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    losses, rates = [], []
    for _ in range(epochs):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            rates += [lr_scheduler.get_last_lr()[0], optimizer.param_groups[0]["lr"]]
        model.eval()
        right = []
        for batch in eval_dataloader:
            with torch.no_grad():
                logits = model(**batch).logits
            predictions, references = accelerator.gather_for_metrics((logits.argmax(dim=-1), batch["labels"]))
            right.append((predictions == references).float())
        right = torch.cat(right)
        assert len(right) == 14, len(right)
        losses.append(right.mean().item())
    accelerator.end_training()
    return losses + rates
