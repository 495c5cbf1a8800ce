"""`--cp N`: the ranks of a group share each sequence. An attention function, and a split of the batch; engines know nothing of it.

`ulysses`: all-to-all before and after the kernel, which sees the whole sequence and a share of the heads (Jacobs et al. 2023).
`gather`: every rank has all keys and values and its own queries, for any number of heads. What describes whole rows travels with
each micro-batch, through the model's keyword arguments, so recomputation in the backward sees the rows of its forward.
"""

from __future__ import annotations

import math
import sys
from functools import cache, lru_cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from toolkit.config.tables import ATTENTIONS
from toolkit.core.errors import StrategyError
from toolkit.core.units import BYTES_OF, ceil_div
from toolkit.engines.job import Job, Transform
from toolkit.engines.records import Transfer
from toolkit.engines.registry import register_transform
from toolkit.models.varlen import BOUNDS, VARLEN, register_varlen
from toolkit.transforms.whole_rows import Rows, zigzag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

WHOLE_ROWS = "cp_rows"
"""The keyword argument of the model and of its attention with the whole rows."""

FILLERS = {"input_ids": 0, "labels": -100, "attention_mask": 0}
"""What lengthens a row [b, s] to a multiple of cp; these are not trained."""

BY_LENGTH = {"longrope", "dynamic"}
"""Kinds of rotary frequencies that follow from the highest position of a call: ranks would choose different ones."""

KERNELS = tuple(word for word, kernel in ATTENTIONS.items() if kernel.divides_rows)
"""Kernels that run inside."""


class ContextParallel(Transform):
    """`--cp N`, `--cp-attention ulysses | gather`."""

    name = "cp"

    def settings(self, job: Job) -> tuple[int, str] | None:
        cp = job.strategy.cp
        return None if cp == 1 else (cp, attention_kind(job))

    def ranks(self, job: Job) -> int:
        return job.strategy.cp

    def refuse(self, job: Job) -> None:
        strategy, spec, cp = job.strategy, job.spec, job.strategy.cp
        if spec is not None and spec.kind != "causal":
            _refuse(f"needs a causal language model, and {spec.architecture} is none", "Leave out --cp.", cp)
        if strategy.compile:
            _refuse("does not run with --compile yet", "Leave out one of the two.", cp)
        if strategy.attention not in KERNELS:
            kernels = " or ".join(KERNELS)
            _refuse(f"does not run with attention {strategy.attention!r}", f"Choose --attention {kernels}.", cp)
        if spec is None:
            return  # the engine alone is asked
        if strategy.cp_attention == "ulysses" and spec.heads % (cp * strategy.tp):
            heads = f"{spec.heads} heads" + (f" over tp {strategy.tp}" if strategy.tp > 1 else "")
            _refuse(f"does not divide the {heads}", "Choose --cp-attention gather, or another --cp.", cp)
        if spec.config.get("output_router_logits"):
            fix = "Set output_router_logits to false in config.json, or leave out --cp."
            _refuse(f"splits the rows over which {spec.architecture} balances its experts", fix, cp)
        kinds = {str(rope.get("rope_type")) for rope in _ropes(spec.config.get("rope_parameters"))} & BY_LENGTH
        if kinds:
            _refuse(
                f"splits the rows by the length of which {spec.architecture} chooses its rotary frequencies (rope_type "
                f"{min(kinds)!r})",
                "Leave out --cp.",
                cp,
            )
        longer = _whole_length(job, job.train_config.seq_len)
        if spec.max_positions is not None and longer > spec.max_positions >= job.train_config.seq_len:
            fits = spec.max_positions // job.strategy.token_parts * job.strategy.token_parts
            what = f"lengthens rows to {longer} tokens, and {spec.name} has {spec.max_positions} positions"
            _refuse(what, f"Choose --seq-len {fits}.", cp)
        layers = sorted(set(spec.config.get("layer_types") or ()) - {"full_attention", "sliding_attention"})
        if layers or not spec.heads:
            names = ", ".join(layers) or "none"
            _refuse(f"runs full and sliding attention, and {spec.architecture} has {names}", "Leave out --cp.", cp)
        if not spec.takes_positions:
            _refuse(f"needs a model that takes position_ids, and {spec.architecture} does not", "Leave out --cp.", cp)
        if spec.stateful:
            what = f"splits attention alone, and {spec.architecture} has layers {spec.stateful[0]} with a state of their own"
            _refuse(what, "Leave out --cp.", cp)

    def apply(self, model: Any, job: Job) -> Any:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        _register()
        base.set_attn_implementation(f"cp_{job.strategy.attention}")
        base.register_forward_hook(_check_rows, with_kwargs=True)
        _group(job)  # made while all ranks are here
        return model

    def split(self, batch: Any, job: Job, rank: int, masked: bool | None = None) -> Any:
        import torch

        tokens, positions, padding = batch["input_ids"], batch.get("position_ids"), batch.get("attention_mask")
        positions = _positions(tokens, positions, batch.get(BOUNDS[0]))
        traced = masked is not None  # values are not there
        if masked is None:
            several = bool((positions.diff(dim=-1) != 1).any())
            masked = several or (padding is not None and not bool(padding.all()))
        size, place = _whole_length(job, tokens.shape[1]) // job.strategy.cp, job.coordinates(rank).cp
        if more := size * job.strategy.cp - tokens.shape[1]:
            batch = _lengthen(batch, more)
            # They go on with the last document: no token before them sees them.
            positions = torch.cat(
                [positions, positions[:, -1:] + torch.arange(1, more + 1, device=positions.device)], 1
            )
            padding = batch.get("attention_mask")
        # No token sees those behind it, so padding at the end of a row needs no mask.
        at_end = padding is None or traced or bool((padding[:, 1:] <= padding[:, :-1]).all())
        kind, joined = attention_kind(job), job.strategy.attention == VARLEN and at_end
        parts: Sequence[slice | Tensor] = [
            slice(number * size, (number + 1) * size) for number in range(job.strategy.cp)
        ]
        if joined and kind == "gather" and not traced and size % 2 == 0:
            parts = zigzag(job.strategy.cp, size)
        part = parts[place]
        rows = Rows(kind, _group(job), positions, padding if masked else None, masked, part, joined)
        bounds, rows.keys = rows.documents(parts) if joined and not traced else ({}, None)
        taken = {name: batch[name][:, part] for name in FILLERS if name in batch and name != "attention_mask"}
        rest = {name: value for name, value in batch.items() if name not in ("attention_mask", *BOUNDS)}
        return {**rest, **taken, **bounds, "position_ids": positions[:, part], WHOLE_ROWS: rows}

    def communication(self, job: Job) -> list[Transfer]:
        """Return what a rank sends of a micro-batch: for each layer in the forward, its recomputation and the backward."""
        spec, cp, config = job.spec, job.strategy.cp, job.train_config
        assert spec is not None
        key_heads = spec.config.get("num_key_value_heads") or spec.heads
        size = spec.config.get("head_dim") or spec.hidden // spec.heads
        tokens = config.micro_batch * ceil_div(config.seq_len, cp)
        heads, key_heads = spec.heads // job.strategy.tp, max(1, key_heads // job.strategy.tp)
        # Ulysses sends all but its own share of queries, keys, values and outputs; gather its keys and values to all others.
        ulysses = attention_kind(job) == "ulysses"
        sent = 2 * (heads + math.lcm(key_heads, cp)) / cp if ulysses else 2 * key_heads
        layer = sent * (cp - 1) * tokens * size * BYTES_OF[job.compute_dtype]
        passes = 2 + job.strategy.recomputed_share
        what = "heads, exchanged" if ulysses else "keys and values, gathered"
        return [Transfer(passes * spec.layers * layer, config.accumulation, "nothing", "cp", what)]


register_transform(ContextParallel())


def attention_kind(job: Job) -> str:
    """Return `ulysses` or `gather`: `auto` takes Ulysses where the group divides a tp rank's query heads."""
    strategy, spec = job.strategy, job.spec
    if strategy.cp_attention != "auto":
        return strategy.cp_attention
    return "ulysses" if spec is not None and spec.heads % (strategy.cp * strategy.tp) == 0 else "gather"


def _ropes(parameters: Any) -> list[dict[str, Any]]:
    """Return the rotary parameters of a config: one set, or one for each kind of layers."""
    if not isinstance(parameters, dict):
        return []
    return [parameters, *(each for each in parameters.values() if isinstance(each, dict))]


def _whole_length(job: Job, tokens: int) -> int:
    """Return the tokens of a lengthened row."""
    return ceil_div(tokens, job.strategy.token_parts) * job.strategy.token_parts


def _positions(tokens: Tensor, positions: Tensor | None, starts: Tensor | None) -> Tensor:
    """Return positions [b, s], from 0 in each document where its bounds alone are given. Refuse bounds that say otherwise."""
    import torch

    places = torch.arange(tokens.shape[1], device=tokens.device)
    if starts is not None:
        starts = starts.to(tokens.device)
        if len(tokens) > 1 or starts.ndim != 1 or starts[-1] != tokens.shape[1]:
            _refuse(f"got {BOUNDS[0]} that do not end with the one row of {tokens.shape[1]} tokens", "Leave them out.")
        places = places - starts[:-1].repeat_interleave(starts.diff())
        if positions is not None and bool(((places == 0) & (positions.flatten() != 0)).any()):
            _refuse(f"got documents in {BOUNDS[0]} that position_ids do not begin at 0", "Give one of the two.")
    return (places if positions is None else positions).expand_as(tokens)


def _lengthen(batch: Any, more: int) -> dict[str, Any]:
    """Return the batch with so many more tokens at the end of each row."""
    from torch.nn.functional import pad

    longer = {name: pad(batch[name], (0, more), value=value) for name, value in FILLERS.items() if name in batch}
    return {**batch, **longer}


def _refuse(what: str, fix: str, cp: int | None = None) -> NoReturn:
    raise StrategyError(f"{'context parallelism' if cp is None else f'cp {cp}'} {what}. {fix}")


def _check_rows(model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Refuse a model with an attention of its own, which ignores the rows."""
    if WHOLE_ROWS in kwargs and not kwargs[WHOLE_ROWS].uses.calls:
        _refuse(
            f"needs attention by transformers' interface, which {type(model).__name__} does not use", "Leave out --cp."
        )


def _group(job: Job) -> Any:
    """Return the group of this process; in a trace there are fewer other dimensions."""
    import torch.distributed as dist

    return _mesh_group(dist.group.WORLD, job.device.kind, job.strategy.cp, job.strategy.tp)


@lru_cache(maxsize=1)  # traces make a world each
def _mesh_group(world: Any, device: str, cp: int, tp: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    if world.size() == cp:
        return world
    shape = (world.size() // (cp * tp), cp, tp)  # both are the innermost dimensions
    return init_device_mesh(device, shape, mesh_dim_names=("others", "cp", "tp"))["cp"].get_group()


@cache
def _register() -> None:
    """Register an attention and a mask of transformers for each kernel."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    register_varlen()
    for kernel in KERNELS:
        AttentionInterface.register(f"cp_{kernel}", partial(_attention, kernel))
        AttentionMaskInterface.register(f"cp_{kernel}", ALL_MASK_ATTENTION_FUNCTIONS[kernel])


def _attention(
    kernel: str, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Attend over whole rows.

    Takes and returns what transformers' attention does, of this rank's tokens: [b, heads, s / cp, d], and [b, s / cp, heads, d].
    Without rows (generation, and the logits of an export's check) the tokens are whole rows.
    """
    rows: Rows | None = kwargs.pop(WHOLE_ROWS, None)
    inner = _kernel(kernel, module)
    if rows is None:
        if module.training:
            _refuse(
                "got whole rows in training, and each rank computes a part of them",
                "Call tk.forward_backward(accelerator, model, micro_batches), which divides them.",
            )
        return inner(module, query, key, value, mask, *args, **kwargs)  # type: ignore[no-any-return]
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        _refuse(f"does not split the heads' own terms of {type(module).__name__}", "Leave out --cp.")
    rows.uses.calls += 1
    kwargs.pop("position_ids", None)
    exchanges = rows.kind == "ulysses"
    if exchanges:
        repeats = rows.group.size() // math.gcd(key.shape[1], rows.group.size())
        if repeats > 1:  # fewer heads of keys than ranks
            key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
        query, key, value = (_exchange(each, rows.group) for each in (query, key, value))
    else:
        key, value = (_gather(each, rows.group) for each in (key, value))
    count, whole, joins = len(query), None, kwargs.get(BOUNDS[0]) is not None
    if joins:
        query, key, value = (each.transpose(0, 1).flatten(1, 2)[None] for each in (query, key, value))
        if rows.keys is not None:
            key, value = (each.index_select(2, rows.keys) for each in (key, value))
    elif rows.joined:  # in a trace
        key, value = (key, value) if exchanges else (key.clone(), value.clone())
    else:
        whole = rows.mask(kwargs.get("sliding_window"), not exchanges, implied=kernel != "eager")
    if whole is not None and kernel == "eager":
        whole = _additive(whole, query)
    # The kernel reads the number of heads of the module; here it has a share of them.
    shim = SimpleNamespace(
        num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True, training=module.training
    )
    shim.config, shim.layer_idx = module.config, getattr(module, "layer_idx", 0)
    output, weights = inner(shim, query, key, value, whole, *args, **kwargs)
    if joins:
        output = output.unflatten(1, (count, -1))[0]
    return (_exchange(output, rows.group) if exchanges else output), weights


def _kernel(kernel: str, module: Any) -> Any:
    """Return transformers' attention; the eager one is in the file of each model."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return (
        sys.modules[type(module).__module__].eager_attention_forward
        if kernel == "eager"
        else ALL_ATTENTION_FUNCTIONS[kernel]
    )


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    """Return a mask that is added to the scores."""
    import torch

    return torch.zeros((), dtype=query.dtype, device=query.device).where(mask, torch.finfo(query.dtype).min)


def _exchange(tensor: Tensor, group: Any) -> Tensor:
    """Send part i of dimension 1 to rank i of the group, and join what arrives along dimension 2."""
    import torch

    return _all_to_all(torch.stack(tensor.chunk(group.size(), 1)), group)


def _gather(tensor: Tensor, group: Any) -> Tensor:
    """Return the tokens of all ranks, of dimension 2. In the backward each rank gets the sum of its tokens' gradients."""
    # As an all-to-all of copies: its gradient is an all-to-all and a sum, on gloo too.
    return _all_to_all(tensor.expand(group.size(), *tensor.shape).contiguous(), group)


def _all_to_all(parts: Tensor, group: Any) -> Tensor:
    """Send `parts[i]` to rank i of the group, and join what arrives along its dimension 2."""
    import torch
    from torch.distributed._functional_collectives import all_to_all_single, wait_tensor

    received = wait_tensor(all_to_all_single(parts, None, None, group))  # type: ignore[no-untyped-call]
    return torch.cat(received.unbind(), 2)
