"""Checkpoints that plain Accelerate writes, without the toolkit, each with the real weights of the model in a second file."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import ranks
import tiny

STEPS = 2


def run(cell: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train two steps as `engine` says, save into `into`, and the real weights into `into`.safetensors; says their dtypes."""
    import torch
    from accelerate.utils import set_seed

    accelerator = _accelerator(cell)
    set_seed(0)
    model = _model(cell, folder)
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [{"params": [p for p in trained if p.dim() > 1]}, {"params": [p for p in trained if p.dim() < 2]}]
    optimizer = torch.optim.AdamW([group for group in decayed if group["params"]], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    rows = torch.randint(3, tiny.VOCABULARY - 6, (4, 8), generator=torch.Generator().manual_seed(7))
    mine = rows[int(os.environ["RANK"]) :: 2].contiguous()
    for _ in range(STEPS):
        accelerator.backward(model(input_ids=mine, labels=mine, use_cache=False).loss)
        optimizer.step()
        optimizer.zero_grad()
    into = Path(cell["into"])
    if cell.get("save") == "model":
        accelerator.save_model(model, into, max_shard_size="10KB")
    elif cell.get("save") == "engine":
        model.save_checkpoint(str(into), exclude_frozen_parameters=cell.get("exclude_frozen", False))
    else:
        accelerator.save_state(str(into), safe_serialization=cell.get("safe", True))
    return _real(accelerator, model, into)


def _accelerator(cell: dict[str, Any]) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

    from toolkit.engines.timeouts import handlers
    from toolkit.engines.upstream import shard_with_fsdp

    if cell["engine"] == "ddp":
        return Accelerator(cpu=True)
    if cell["engine"] == "fsdp":
        shard_with_fsdp()
        layers = ["LlamaDecoderLayer"]
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=layers,
            state_dict_type=cell["kind"],
            activation_checkpointing=cell.get("checkpointing", False),
        )
        return Accelerator(fsdp_plugin=plugin)
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    # The ninja of this environment, as the toolkit takes it: another version of it would compile DeepSpeed's operator again.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    buckets = {"reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000, "sub_group_size": 700}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": cell["stage"], **buckets, "stage3_param_persistence_threshold": 100},
        "bf16": {"enabled": cell.get("bf16", False)},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    return Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=cell["stage"] == 3),
        kwargs_handlers=handlers(None, "gloo"),
    )


def _model(cell: dict[str, Any], folder: str) -> Any:
    """Sizes that two ranks do not divide evenly, a buffer, and tied weights; with LoRA where it is asked for."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.register_buffer("seen", torch.tensor([3, 1, 4]))
    if cell.get("lora"):
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=1, target_modules=["q_proj", "o_proj"]))
    return model


def _real(accelerator: Any, model: Any, into: Path) -> dict[str, Any]:
    """Every parameter whole, its master where there is one, by ways that read no file."""
    from accelerate.utils import extract_model_from_parallel
    from safetensors.torch import save_file

    plain = extract_model_from_parallel(model)
    tensors = {name: _whole(parameter) for name, parameter in plain.named_parameters(remove_duplicate=False)}
    tensors |= {name: buffer for name, buffer in plain.named_buffers() if name.endswith("seen")}
    tensors = {name.replace("_checkpoint_wrapped_module.", ""): tensor.contiguous() for name, tensor in tensors.items()}
    if accelerator.is_main_process:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, str(into) + ".safetensors")
    accelerator.wait_for_everyone()
    return {"dtypes": sorted({str(tensor.dtype) for tensor in tensors.values()})}


def _whole(parameter: Any) -> Any:
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    if hasattr(parameter, "full_tensor"):
        return parameter.full_tensor().detach()
    if parameter.requires_grad and (hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")):
        return safe_get_full_fp32_param(parameter).detach().clone()
    if hasattr(parameter, "ds_id"):
        with GatheredParameters([parameter]):
            return parameter.detach().clone()
    return parameter.detach().clone()


if __name__ == "__main__":
    ranks.main(run, *sys.argv[1:])
