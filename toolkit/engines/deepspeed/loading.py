"""Packed weights under ZeRO-3: each is partitioned as soon as it is packed. transformers skips `zero.Init` for them."""

from __future__ import annotations

from typing import Any


def partition_packed(model: Any) -> None:
    """Read each parameter of the model and keep this rank's part of it. A collective.

    Source: deepspeed/runtime/zero/partition_parameters.py `Init._zero_init_param`.
    """
    import deepspeed
    from transformers.integrations.deepspeed import deepspeed_config

    init = deepspeed.zero.Init(config_dict_or_path=deepspeed_config(), dtype=model.dtype)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    filled: dict[int, Any] = {}
    for module in model.modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in filled:
                filled[id(parameter)] = _filled(model.streamed_weights, names[id(parameter)], module, parameter)
                init._zero_init_param(filled[id(parameter)])
            module._parameters[leaf] = filled[id(parameter)]
    for buffer in model.buffers():  # DeepSpeed does not move a model that is partitioned
        buffer.data = buffer.data.to(init.local_device)
    model.streamed_weights.close()
    del model.streamed_weights


def _filled(weights: Any, name: str, module: Any, parameter: Any) -> Any:
    """Return the parameter with its values, whole on every rank."""
    import torch

    if type(parameter).__name__ == "Params4bit":
        data = weights.share_packed(name, module)
        options = {**parameter.__dict__, "quant_state": module.quant_state}
        return type(parameter)(data, requires_grad=False, **options)
    whole = weights.share(name).to(parameter.dtype)
    if whole.device.type == "cpu" and not whole.untyped_storage().resizable():
        whole = whole.clone()  # rank 0's may be a view of the mapped file
    return torch.nn.Parameter(whole, requires_grad=parameter.requires_grad)
