"""Names of other training tools (HF Trainer, TRL, Axolotl, DeepSpeed, torchrun), and the flags that mean the same here."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

_FLAGS = """
num_train_epochs num_epochs n_epochs max_epochs: --epochs {}
max_steps total_steps train_steps max_train_steps: --steps {}
per_device_train_batch_size micro_batch_size train_micro_batch_size_per_gpu batch_size train_batch_size: --micro-batch {}
per_device_eval_batch_size eval_batch_size: --eval-micro-batch {}
gradient_accumulation_steps grad_accum gradient_accumulation accumulate_grad_batches: --accumulation {}
learning_rate: --lr {}
warmup_ratio warmup_steps num_warmup_steps: --warmup {}
lr_scheduler_type lr_scheduler: --scheduler {}
lr_scheduler_type=constant_with_warmup lr_scheduler=constant_with_warmup: --scheduler constant
optim=adamw optim=adamw_torch optim=adamw_torch_fused optim=adamw_hf: --optimizer adamw
optim optimizer_type: leave it out, since only adamw runs here
wd: --weight-decay {}
gradient_clipping clip_grad grad_clip max_norm: --max-grad-norm {}
adam_beta1: --beta1 {}
adam_beta2: --beta2 {}
adam_epsilon: --eps {}
bf16 bfloat16: --precision bf16
fp16 half: --precision fp16
fp32 no_mixed_precision: --precision fp32
mixed_precision dtype torch_dtype: --precision {}
mixed_precision=no: --precision fp32
dtype=bfloat16 torch_dtype=bfloat16: --precision bf16
dtype=float16 torch_dtype=float16: --precision fp16
dtype=float32 torch_dtype=float32: --precision fp32
use_peft use_lora lora peft: --adapter lora
use_dora dora: --adapter dora
qlora use_qlora load_in_4bit use_4bit: --adapter qlora
load_in_8bit use_8bit: --adapter qlora8
lora_r lora_dim: --lora-rank {}
lora_target_modules lora_target target_modules: --lora-targets {}
gradient_checkpointing use_gradient_checkpointing: --activation-checkpointing full
max_seq_length max_seq_len max_length sequence_len cutoff_len model_max_length block_size: --seq-len {}
sample_packing=false sample_packing=no sample_packing=0 pack=false: --no-packing
sample_packing pack: --packing
dataset datasets dataset_name dataset_path data_path train_file train_data: --data {}
validation_file eval_dataset eval_file val_data valid_data: --eval-data {}
dataset_text_field text_field: --text-column {}
model_name_or_path base_model model_name model_id pretrained_model_name_or_path: --model {}
output_dir out_dir output_path: --run-dir {}
run_name: --run-dir runs/{}
report_to log_with: --tracker {}
report_to=none: leave it out, since without --tracker there is none
logger wandb: --tracker wandb
logging_steps log_every logging_strategy: leave it out, since every step is recorded
save_steps save_freq checkpoint_every: --save-every {}
save_total_limit: --keep {}
eval_steps eval_freq eval_interval: --eval-every {}
evaluation_strategy eval_strategy do_eval: --eval-data FILE --eval-every 100
evaluation_strategy=no eval_strategy=no: leave it out, since without --eval-data there is none
save_strategy save_strategy=epoch: --save-every 100
load_best_model_at_end save_best_model: --save-best
early_stopping_patience early_stopping: --early-stop {}
resume_from_checkpoint: --resume --run-dir {}
resume_from_checkpoint=true: --resume --run-dir RUN
nproc_per_node nproc num_processes num_gpus n_gpus gpus num_gpus_per_node: --processes {}
zero_stage zero: --sharding zero{}
deepspeed ds_config deepspeed_config_file: --deepspeed-config {}
use_deepspeed: --sharding zero3
fsdp use_fsdp fsdp_config fsdp_sharding_strategy fully_shard: --sharding fsdp
fsdp=shard_grad_op fsdp_sharding_strategy=shard_grad_op: --sharding fsdp_grad_op
fsdp=hybrid_shard fsdp_sharding_strategy=hybrid_shard: --sharding hsdp --dp-replicate 2
cpu_offload offload_optimizer offload_param: --offload cpu
tensor_parallel_size tensor_model_parallel_size tp_size: --tp {}
attn_implementation: --attention {}
use_flash_attention_2 flash_attention flash_attn use_flash_attn flash_attention_2: --attention flash_attention_2
random_seed data_seed: --seed {}
train_on_inputs: --no-mask-prompts
completion_only_loss=false assistant_only_loss=false train_on_responses_only=false: --no-mask-prompts
train_on_inputs=false completion_only_loss assistant_only_loss train_on_responses_only: --mask-prompts
dataloader_num_workers num_workers: --workers {}
tokenizer_name tokenizer tokenizer_name_or_path: leave it out, since the model's own tokenizer is used
push_to_hub hub_model_id: leave it out, and upload RUN/export afterwards with `hf upload`
config config_file config_path: leave it out, and give its fields as flags (a DeepSpeed file with --deepspeed-config)
do_train overwrite_output_dir remove_unused_columns ddp_find_unused_parameters local_rank: leave it out
nnodes num_machines node_rank machine_rank master_addr master_port: leave it out, since `train` runs on one machine
"""
"""Names, or NAME=VALUE for one value: our flags, with the value for `{}`; or a sentence that begins with `leave it out`."""

HINTS: dict[str, str] = {
    name: hint
    for line in _FLAGS.strip().splitlines()
    for names, hint in [line.split(": ", 1)]
    for name in names.split()
}

VERBS = dict.fromkeys(("finetune", "fine-tune", "sft", "fit", "run", "start", "pretrain"), "train")
VERBS |= {"preprocess": "preview", "tokenize": "preview", "estimate-memory": "forecast", "estimate": "forecast"}
VERBS |= {"merge": "export", "merge-lora": "export", "merge-weights": "export", "env": "doctor", "ls": "runs"}
VERBS |= dict.fromkeys(("chat", "infer", "inference", "predict", "sample"), "generate")
"""Verbs of other tools → ours."""

SHARDING_NAMES = {"deepspeed": "zero3", "fsdp1": "fsdp", "fsdp2": "fsdp", "zero": "zero3", "ds": "zero3", "dp": "ddp"}
"""Names of libraries and of others' strategies → the sharding that is meant."""


def spell_hint(name: str, values: Sequence[object] = ()) -> str:
    """Return our flags for a flag of another tool: `spell_hint("--num_train_epochs", ["3"])` → `"--epochs 3"`.

    An empty string for a name that the table does not have. A sentence begins with `leave it out`.
    """
    key = name.lstrip("-").lower().replace("-", "_")
    words = [str(value) for value in values]
    first = words[0].split()[0].lower() if words and words[0].split() else ""
    hint = HINTS.get(f"{key}={first}", HINTS.get(key, ""))
    if first in ("false", "no", "0") and f"{key}={first}" not in HINTS and "{}" not in hint:
        return "leave it out" if hint else ""
    several = any(flag in hint for flag in ("--lora-targets", "--tracker", "--data"))
    return hint.format(shlex.quote(",".join(words) if several else words[0]) if words else "VALUE")
