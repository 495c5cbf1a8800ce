"""In the manner of transformers' examples: a Trainer, which makes its own Accelerator."""

import os

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    ids = torch.randint(3, 250, (32, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def main(folder, output_dir):
    args = TrainingArguments(
        output_dir=output_dir,
        per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-3,
        warmup_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=AutoModelForCausalLM.from_pretrained(folder), args=args, train_dataset=Rows())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return type(trainer.model_wrapped).__name__, losses, trainer.model_wrapped, trainer.optimizer, trainer.accelerator
