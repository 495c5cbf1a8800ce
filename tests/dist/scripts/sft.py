"""In the manner of TRL's documentation: an SFTTrainer, given a folder."""

import sys

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

ids = torch.randint(3, 250, (32, 16), generator=torch.Generator().manual_seed(1)).tolist()
args = SFTConfig(
    output_dir=sys.argv[2],
    per_device_train_batch_size=4,
    max_steps=2,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    bf16=False,
)
trainer = SFTTrainer(model=sys.argv[1], args=args, train_dataset=Dataset.from_dict({"input_ids": ids}))
trainer.train()
print("trained", type(trainer.model_wrapped).__name__)
