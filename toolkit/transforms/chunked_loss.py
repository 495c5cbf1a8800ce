"""`--loss chunked`: the head computes the loss a chunk of tokens at a time, and no rank holds whole logits.

The loss is made in the head's own forward, where every engine has gathered its weight. The gradients of hidden states and weight
are made there too, so a chunk's logits are freed at once. Outside of `losses.loss_sum` the head returns logits as before.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial, update_wrapper
from typing import TYPE_CHECKING, Any, NoReturn

from toolkit.core.errors import StrategyError
from toolkit.core.units import ceil_div
from toolkit.engines.job import Job, Transform
from toolkit.engines.losses import GPU_CHUNK, HEAD_CALL, HeadCall
from toolkit.engines.registry import register_transform

if TYPE_CHECKING:
    import torch

CPU_CHUNK, FEW_TOKENS = 256, 1024
"""Tokens of a chunk on a CPU; half as many for micro-batches of less than `FEW_TOKENS`, in which a chunk would outweigh whole
logits."""

ADDED_ROWS = 256
"""Rows of a weight's gradient in bf16 that are added at once on a CPU."""

BLOCK = 32
"""Tokens of which a CPU takes the softmax at once, so that their logits stay in its cache."""

WHOLE_ONLY = ("chameleon", "inkling", "inkling2", "prophetnet", "blenderbot", "blenderbot-small", "m2m_100", "nllb-moe")
"""Models that change single logits, call the head for several tokens ahead, or make the decoder's input from labels themselves."""

CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names in configs of the cap: the logits become cap · tanh(logits / cap)."""

SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier")
"""Names in configs of a factor of the logits. Granite divides by it."""


class ChunkedLoss(Transform):
    """`--loss chunked`, for heads that are plain linear modules. It follows an adapter, which may copy the head."""

    name = "loss"

    def settings(self, job: Job) -> tuple[str, int] | None:
        return None if job.strategy.loss == "whole" else (job.strategy.loss, _rows(job))

    def refuse(self, job: Job) -> None:
        if job.spec is not None and job.spec.config.get("model_type") in WHOLE_ONLY:
            _refuse(f"does not run {job.spec.architecture}")

    def apply(self, model: Any, job: Job) -> Any:
        from torch.nn import Linear

        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        head = base.get_output_embeddings()
        if hasattr(head, "modules_to_save"):  # PEFT's trained copy
            head = head.modules_to_save[head.active_adapters[0]]
        if getattr(type(head), "forward", None) is not Linear.forward:
            _refuse(f"needs a head that is torch's Linear, and {type(base).__name__} has a {type(head)}")
        config = base.config.get_text_config(decoder=True)
        cap = next(filter(None, (getattr(config, name, None) for name in CAPS)), None)
        scale = next(filter(None, (getattr(config, name, None) for name in SCALES)), 1.0)
        scale = 1 / scale if "granite" in config.model_type else scale
        chunked = ChunkedHead(head, base, scale, cap, _rows(job))
        head.forward = update_wrapper(partial(chunked.forward, head.forward), head.forward)
        call = "tk.forward_backward(accelerator, model, micro_batches)"
        fix = call if job.strategy.cp > 1 else "loss = tk.loss(model, batch)"
        base.register_forward_pre_hook(partial(_take_labels, fix), with_kwargs=True)
        return model


register_transform(ChunkedLoss())


def _rows(job: Job) -> int:
    """Return the tokens of a chunk: one number for a job, so that its memory is linear in the tokens."""
    tokens = job.train_config.micro_batch * ceil_div(job.train_config.seq_len, job.strategy.cp)
    if job.device.kind != "cpu":
        return GPU_CHUNK
    return CPU_CHUNK if tokens >= FEW_TOKENS else CPU_CHUNK // 2


def _refuse(what: str) -> NoReturn:
    raise StrategyError(f"loss 'chunked' {what}. Choose --loss whole.")


def _take_labels(fix: str, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Give a decoder its input in the place of labels, of which the model would make a loss of its own, over whole logits."""
    import torch

    if kwargs.get("labels") is not None:
        if HEAD_CALL.get() is not None and model.config.is_encoder_decoder:
            kwargs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=kwargs.pop("labels"))
        elif HEAD_CALL.get() is None and model.training and torch.is_grad_enabled():
            raise StrategyError(
                f"loss 'chunked': model(labels=...) makes whole logits. Write {fix}, or choose --loss whole."
            )
    return args, kwargs


@dataclass(eq=False)
class ChunkedHead:
    """A head that computes the loss itself."""

    head: Any
    model: Any
    """Its `final_logits_bias` is added to the logits, if it has one."""
    scale: float
    cap: float | None
    rows: int
    """Tokens of a chunk."""

    def forward(self, inner: Any, hidden: torch.Tensor) -> Any:
        """Return logits; within `loss_sum` a row of numbers for logits, and the loss by way of the call's `finish`.

        The row is no logits, but modules and engines pass it on as such, and its gradient comes back the same way. Its first
        number is 0, where any cap has the slope 1: the gradient there is the loss's, times the scale.
        """
        import torch

        call, name, weight, bias = HEAD_CALL.get(), type(self.model).__name__, self.head.weight, self.head.bias
        if call is None:
            return inner(hidden)
        if call.finish is not None or hidden.shape[:-1] != call.labels.shape:
            _refuse(f"needs one call of the head with all tokens; {name} calls it with {list(hidden.shape[:-1])}")
        group = weight.device_mesh.get_group("tp") if hasattr(weight, "device_mesh") else None
        if group is not None:
            weight, bias = weight.to_local(), None if bias is None else bias.to_local()
        total, row = _head_loss().apply(self, call, group, torch.is_grad_enabled(), hidden, weight, bias)

        def finish(logits: torch.Tensor) -> Any:
            if "checked" not in vars(self.head) and _has_values(logits):
                known = row.detach() * self.scale + getattr(self.model, "final_logits_bias", 0)
                known = (known / self.cap).tanh() * self.cap if self.cap else known
                if logits.shape != known.shape or (logits - known).abs().max() > 0.02 * known.abs().max():
                    _refuse(f"does not know what {name} does to its logits after the head")
                self.head.checked = True
            first = logits.flatten()[0]
            return total + (first - first.detach())

        call.finish = finish
        return row

    def sums(self, x: Any, labels: Any, weight: Any, bias: Any, group: Any, needs: Any) -> tuple[Any, Any, Any]:
        """Return the sums of the loss, of the weight's gradient and the bias's, in fp32. The rows of `x` become their gradients.

        Buffers have one size, so memory is linear in the tokens: a forecast follows from two short traces.

        Args:
            x: [n, h], in the dtype of the products.
            labels: [n, 1].
            weight, bias: this rank's part of the vocabulary.
            group: the ranks that share the vocabulary, or None.
            needs: which gradients are computed: of x, weight and bias.
        """
        import torch

        size, part, rows = len(x), len(weight), self.rows
        first = group.rank() * -(-self.head.out_features // group.size()) if group is not None else 0
        targets = (labels - first).clamp(0, part - 1)
        elsewhere = (labels != targets + first).float()
        biases = [each for each in (bias, getattr(self.model, "final_logits_bias", None)) if each is not None]
        # Where ranks share the vocabulary, each block has collectives of its own.
        block = BLOCK if rows < GPU_CHUNK and group is None else rows
        narrow = None if _by_onednn(x) else weight.new_empty(rows, part)
        wide = None if weight.dtype == torch.float32 else elsewhere.new_empty(rows, part)
        log_p, columns = x.new_empty(size, 1, dtype=torch.float32), elsewhere.new_empty(3, block, 1)
        tanh = elsewhere.new_empty(block, part) if self.cap else None
        dw = elsewhere.new_zeros(weight.shape) if needs[1] else None
        db = elsewhere.new_zeros(2, part) if needs[2] else None
        product = torch.empty_like(weight) if needs[1] and wide is not None else None
        how = {"tanh": tanh, "columns": columns, "biases": biases, "group": group, "trains": any(needs)}
        for given, *others in zip(*(each.split(rows) for each in (x, targets, elsewhere, log_p)), strict=True):
            slope = _product(given, weight.t(), narrow)
            logits = slope if wide is None else wide[: len(given)].copy_(slope)
            for parts in zip(*(each.split(block) for each in (logits, *others)), strict=True):
                self._to_slope(*parts, **how)
            if wide is not None and any(needs):
                slope.copy_(logits)
            if db is not None:
                db[0].add_(torch.sum(logits, 0, out=db[1]))
            if product is not None and dw is not None:
                torch.mm(slope.t(), given, out=product)
                # A CPU adds another dtype by way of an fp32 copy, so a few rows at a time.
                step = ADDED_ROWS if rows < GPU_CHUNK else part
                for start_row in range(0, part, step):
                    dw[start_row : start_row + step].add_(product[start_row : start_row + step])
            elif dw is not None:
                torch.addmm(dw, slope.t(), given, out=dw)
            if needs[0]:
                _product(slope, weight, given)
            del slope, logits, parts  # before the next chunk's
        return (log_p * (elsewhere - 1)).sum(), dw, None if db is None else db[0]

    def _to_slope(
        self,
        logits: Any,
        target: Any,
        other: Any,
        log_p: Any,
        *,
        tanh: Any,
        columns: Any,
        biases: Any,
        group: Any,
        trains: bool,
    ) -> None:
        """Fill `log_p`, and turn the head's products into the loss's derivatives in place. The first four have one row a token."""
        import torch

        count = len(logits)
        for each in biases:
            logits.add_(each)
        if self.scale != 1:
            logits.mul_(self.scale)
        if self.cap:
            tanh[:count].copy_(logits.div_(self.cap).tanh_())
            logits.mul_(self.cap)
        _log_softmax(logits, group, *columns[:, :count])
        torch.gather(logits, 1, target, out=log_p)
        if trains:
            # The probability, minus 1 at the target.
            minus = torch.expm1(log_p, out=columns[0, :count]).add_(other)
            logits.exp_().scatter_(1, target, minus)
            if self.cap:
                torch.addcmul(logits, logits, tanh[:count].square_(), value=-1, out=logits)


def _has_values(tensor: Any) -> bool:
    """Return whether a tensor has values. A trace's are of a class of their own."""
    import torch

    return type(tensor) is torch.Tensor


def _by_onednn(x: Any) -> bool:
    """Return whether products are oneDNN's: in fp32 on a CPU 1.2 to 1.9 times as fast as MKL's on AMD.

    It makes a tensor for each product. A trace makes the products in a buffer of the logits' size.
    """
    import torch

    if x.device.type != "cpu" or x.dtype != torch.float32 or not _has_values(x):
        return False
    return bool(torch.backends.mkldnn.enabled) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _product(x: Any, weight: Any, out: Any) -> Any:
    """Return x @ weight, in the first rows of `out` if it is given."""
    import torch

    if _by_onednn(x):
        with suppress(RuntimeError):  # short of memory, of which torch's own product may need less, or says so
            made = torch.ops.mkldnn._linear_pointwise(x, weight.t(), None, "none", [], "")
            return made if out is None else out.copy_(made)
    return torch.mm(x, weight, out=None if out is None else out[: len(x)])


def _log_softmax(logits: Any, group: Any, lse: Any, largest: Any, total: Any) -> None:
    """Take the logarithm of the softmax in place, over the whole vocabulary where a group shares it; the others are buffers."""
    import torch
    from torch.distributed import ReduceOp, all_reduce

    lse.copy_(logits[:, :1])
    torch.log_softmax(logits, 1, out=logits)
    if group is not None:
        all_reduce(largest.copy_(lse.sub_(logits[:, :1])), ReduceOp.MAX, group=group)
        all_reduce(torch.sub(lse, largest, out=total).exp_(), group=group)
        logits.add_(lse.sub_(largest).sub_(total.log_()))


@cache
def _head_loss() -> Any:
    """Return the autograd function: (loss sum, row of numbers). Its gradients are made in the forward."""
    import torch

    class HeadLoss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, chunked: ChunkedHead, call: HeadCall, group: Any, trains: bool, *tensors: Any) -> Any:
            (hidden, weight, bias), needs = tensors, [trains and each for each in ctx.needs_input_grad[4:]]
            kind, x, labels = hidden.device.type, hidden.flatten(0, -2), call.labels.flatten()
            trained = (labels != -100).nonzero()[:, 0] if call.trained is None else call.trained
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
            with torch.autocast(kind, enabled=False):
                rows, labels = x.index_select(0, trained).to(dtype), labels.index_select(0, trained)[:, None]
                total, dw, db = chunked.sums(rows, labels, weight.to(dtype), bias, group, needs)
                dx = rows.new_zeros(x.shape).index_copy_(0, trained, rows).view(hidden.shape) if needs[0] else None
            for tensor in (total, dx) if group is not None else ():
                if tensor is not None:
                    torch.distributed.all_reduce(tensor, group=group)
            ctx.gradients, ctx.dtypes = (dx, dw, db), [getattr(tensor, "dtype", None) for tensor in tensors]
            ctx.mark_non_differentiable(total)
            row = torch.linspace(0, 30, chunked.head.out_features, device=hidden.device)[None, None]
            return total, row.clone()  # no view, of which FSDP2 warns

        @staticmethod
        def backward(ctx: Any, _: Any, gradient: torch.Tensor) -> Any:
            gradients, ctx.gradients = ctx.gradients, None
            if gradients is None:
                raise RuntimeError("loss 'chunked' has one backward for each forward.")
            factor, pairs = gradient.flatten()[0], zip(gradients, ctx.dtypes, strict=True)
            return *[None] * 4, *(each if each is None else each.mul_(factor).to(dtype) for each, dtype in pairs)

    return HeadLoss
