# %% [markdown]
# # Activations: what the backward needs, and what it costs to compute it twice
#
# The forward computes; the backward then asks for almost everything that the forward saw. This notebook counts
#
# * what one layer keeps, tensor by tensor;
# * what **activation checkpointing** does to it: keep the layer's input alone, and compute the rest a second time;
# * what that saves and costs in a real training: forecast, then measured;
# * where **O(√L)** comes from, and why Transformers are checkpointed layer by layer all the same.

# %%
# Installs the toolkit where it is missing, as on Colab; elsewhere it does nothing. An installed torch stays as it is.
import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile

if importlib.util.find_spec("toolkit") is None:
    wanted = "accelerate-toolkit[all]"  # or the path of a wheel
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        if importlib.util.find_spec("torch"):
            print("torch==" + importlib.metadata.version("torch"), file=constraints, flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", constraints.name]
        subprocess.run([*pip, wanted], check=True)

# %%
import toolkit as tk

tk.environment()

# %% tags=["parameters"]
GPU = tk.hardware().device.kind == "cuda"
WIDTH = 512 if GPU else 128  # of the layer that is looked at
TOKENS = 512 if GPU else 128
BATCH = 8 if GPU else 2
DEPTHS = (4, 9, 16, 36, 64)  # layers of the stacks that are measured
REPEATS = 5  # of each timing; the shortest counts
STEPS = 12  # of each of the two runs
SEQ_LEN = 1024 if GPU else 256  # of a row in those runs
MICRO_BATCH = 8

# %% [markdown]
# ## What one layer keeps
#
# A Transformer's layer, written out: attention and an MLP, each behind a norm, each added to what came in.

# %%
import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if GPU else "cpu"


class Layer(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


# %% [markdown]
# PyTorch tells which tensors a forward saves: `saved_tensors_hooks` is called for each. Several may share one
# storage, and the weights are there anyway, so storages are counted, each once and without the weights.


# %%
def saved(module, x, run):
    """Storages that `run(x)` keeps for its backward, the weights left out: address → (shape of the first use, bytes)."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    found = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found.setdefault(storage.data_ptr(), (tuple(tensor.shape), storage.nbytes()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = run(x)
    del made
    return found


torch.manual_seed(0)
layer = Layer(WIDTH).to(device)
x = torch.randn(BATCH, TOKENS, WIDTH, device=device, requires_grad=True)
one = x.untyped_storage().nbytes()  # the layer's input: batch x tokens x width numbers
plain = saved(layer, x, layer)

# %%
from IPython.display import HTML

from toolkit.core.display import Table
from toolkit.core.units import format_bytes

rows = [
    (" x ".join(map(str, shape)), format_bytes(size), f"{size / one:.2f}")
    for shape, size in sorted(plain.values(), key=lambda kept: -kept[1])
]
inner = sum(size for _, size in plain.values()) / one
rows.append(("all", format_bytes(inner * one), f"{inner:.2f}"))
HTML(Table(title="Kept by one layer", columns=("shape", "bytes", "in inputs"), rows=rows).html())

# %% [markdown]
# The layer's input is one unit; the MLP's two wide tensors are four each; query, key and value are three. Together
# that is 16 times the input. (Korthikanti et al. 2022 count 34 bytes for each token and unit of width in 16 bits,
# dropout's masks included: 17 numbers. Attention's scores would come on top; the fused kernel does not keep them.)

# %%
assert 15 < inner < 19

# %% [markdown]
# ## What checkpointing keeps
#
# The same layer through `torch.utils.checkpoint`: the forward runs without keeping anything but the input. In the
# backward it runs again, and only then are the tensors there, for this one layer.

# %%
from torch.utils.checkpoint import checkpoint

kept = saved(layer, x, lambda x: checkpoint(layer, x, use_reentrant=False))
{"plain": format_bytes(inner * one), "checkpointed": format_bytes(sum(size for _, size in kept.values()))}

# %%
assert {size for _, size in kept.values()} == {one}  # the input, and nothing else

# %% [markdown]
# ## A whole stack, through time
#
# Below, 16 layers go forward and backward, and torch's profiler notes every allocation and release. Plain, bytes
# climb through the forward and fall through the backward. Checkpointed, they stay low, and the backward is a row of
# small peaks: one layer at a time.

# %%
from torch.profiler import ProfilerActivity, profile

from toolkit.core.charts import curve
from toolkit.measurement import peak_memory


def stack_of(layers):
    """So many layers, with gradients that exist already: they are no activations, and shall not be counted."""
    made = nn.Sequential(*(Layer(WIDTH) for _ in range(layers))).to(device)
    for parameter in made.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return made


def step(stack, together=None):
    """One forward and backward; `together`: how many layers are checkpointed as one. None: none are."""
    made = x
    if together is None:
        made = stack(made)
    else:
        for first in range(0, len(stack), together):
            made = checkpoint(stack[first : first + together], made, use_reentrant=False)
    made.square().mean().backward()


def peak(stack, together=None):
    """The most that a step allocates above what is there before, in inputs of a layer."""
    return peak_memory(lambda: step(stack, together), device) / one


def totals(tree):
    """Time in ns and the allocator's total, of each allocation and release in a profiler's tree of events."""
    for node in tree:
        if node.name == "[memory]" and node.extra_fields.device.type == device:
            yield node.start_time_ns, node.extra_fields.total_allocated
        yield from totals(node.children)


def timeline(run):
    """What is allocated above the beginning: (ms, in inputs of a layer)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    found = sorted(totals(profiled.profiler.kineto_results.experimental_event_tree()))
    began, least = found[0][0], min(total for _, total in found)
    return [((at - began) / 1e6, (total - least) / one) for at, total in found]


deep = stack_of(16)
step(deep)  # once before anything is measured
ways = {"plain": None, "checkpointed, 4 layers together": 4, "checkpointed, each layer": 1}
peaks = {name: peak(deep, together) for name, together in ways.items()}
lines = {name: timeline(lambda together=together: step(deep, together)) for name, together in ways.items()}
HTML(
    curve(
        lines, title="16 layers, forward and backward", x="ms, with the profiler's own cost", y="in inputs of a layer"
    )
)

# %% [markdown]
# The highest points are what the toolkit measures, too, when it watches a run:

# %%
for name, line in lines.items():
    assert abs(max(total for _, total in line) / peaks[name] - 1) < 0.1
assert peaks["checkpointed, each layer"] < peaks["checkpointed, 4 layers together"] < peaks["plain"] / 2
{name: round(most) for name, most in peaks.items()}

# %% [markdown]
# ## What it costs: a third more work
#
# Of a layer's work the forward is one part, and the backward two: it multiplies once for the input's gradient and
# once for the weights'. With the forward computed again that is four instead of three. PyTorch counts the
# operations:

# %%
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode


def operations(together, early_stop):
    """Floating-point operations of one step."""
    with FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(early_stop):
        step(deep, together)
    return counter.get_total_flops()


once = operations(None, True)
more = {"the whole layer again": operations(1, False) / once - 1, "as far as needed": operations(1, True) / once - 1}
{name: f"{share:.1%} more operations" for name, share in more.items()}

# %% [markdown]
# In practice it is less: PyTorch stops recomputing as soon as it has what the backward asks for, and nobody asks
# for the result of a layer's last product.

# %%
assert abs(more["the whole layer again"] - 1 / 3) < 0.02
assert more["as far as needed"] < more["the whole layer again"]

# %% [markdown]
# And the clock? It is this machine's and this hour's, so nothing is promised here. Norms and activation functions
# count as no operations and take time all the same. The shortest of a few alternating steps:

# %%
import time


def seconds(together):
    """Of one step."""
    began = time.perf_counter()
    step(deep, together)
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - began


took = {name: [] for name in ways}
for _ in range(REPEATS):
    for name, together in ways.items():
        took[name].append(seconds(together))
{name: f"{1000 * min(all_of):.0f} ms, x {min(all_of) / min(took['plain']):.2f}" for name, all_of in took.items()}

# %% [markdown]
# ## O(√L)
#
# Checkpoint a stack of L layers in segments of m layers. From the forward to the backward the inputs of L/m
# segments are kept; while one segment is recomputed, so are the insides of its m layers. With a layer's inside i
# times as large as its input that is
#
# &emsp; L/m + i · m &emsp; inputs.
#
# With m = √L it grows as **√L**, while every layer is still computed only twice (Chen et al. 2016). The least is at
# m = √(L/i), where it is 2 · √(i · L). Measured, beside the formula and what one layer's backward takes on top:

# %%
import math

from toolkit.core.charts import figure

extra = peak(stack_of(1)) - inner  # gradients on their way through a layer


def formula(depth, together):
    """The peak in inputs of a layer."""
    return extra + (inner * depth if together is None else math.ceil(depth / together) + inner * together)


measured, expected = {}, {}
for depth in DEPTHS:
    stack = stack_of(depth)
    sizes = {
        "plain": None,
        "m = 1": 1,
        "m = √L": math.isqrt(depth),
        "m = √(L/i)": max(1, round(math.sqrt(depth / inner))),
    }
    for name, together in sizes.items():
        measured[name, depth] = peak(stack, together)
        expected[name, depth] = formula(depth, together)

names = list(sizes)
rows = [(depth, *(f"{measured[name, depth]:.0f} ({expected[name, depth]:.0f})" for name in names)) for depth in DEPTHS]
title = "Peak in inputs of a layer: measured (formula)"
table = Table(title=title, columns=("layers", *names), rows=rows, notes=("The picture leaves the plain stack out.",))
climbs = {name: [(depth, measured[name, depth]) for depth in DEPTHS] for name in names if name != "plain"}
HTML(
    figure(curve(climbs, title="A checkpoint for m layers of L", x="L, layers", y="peak, in inputs of a layer"), table)
)

# %%
for each, size in measured.items():
    assert abs(size / expected[each] - 1) < 0.1, each
low, high = min(DEPTHS), max(DEPTHS)
grown = {name: (measured[name, high] - extra) / (measured[name, low] - extra) for name in names}
assert abs(grown["plain"] / (high / low) - 1) < 0.1  # as the depth
assert abs(grown["m = √L"] / math.sqrt(high / low) - 1) < 0.1  # as its square root
{f"from {low} to {high} layers": {name: f"x {times:.1f}" for name, times in grown.items()}}

# %% [markdown]
# Now look at m = 1, a checkpoint for each layer. It grows with the depth, but by one input a layer where the plain
# stack grows by 16; m = √L is below it only when L is greater than about i², some 250 layers, and even the best m
# is still 1 or 2 here. That is why transformers, and so this toolkit's `activation_checkpointing="full"`,
# checkpoint layer by layer: it is nearly the least, and nobody has to choose m.

# %%
assert all(measured["m = 1", depth] < measured["m = √L", depth] for depth in DEPTHS if depth < inner**2 / 2)
assert all(measured["m = 1", depth] < 1.5 * measured["m = √(L/i)", depth] for depth in DEPTHS)

# %% [markdown]
# ## In a real training run
#
# Now the embedded model, a Llama of 5M parameters, with and without checkpointing, on one long document: where no
# row holds a second one, attention needs no mask. First the forecast, which runs nothing:


# %%
from pathlib import Path
from pydoc_data.topics import topics

from toolkit.core.charts import Bar, bars

Path("prose.txt").write_text("\n\n".join(topics.values()), encoding="utf-8")
words = {"kept": "none", "recomputed": "full"}
asked = {name: tk.Strategy(activation_checkpointing=word, precision="fp32") for name, word in words.items()}
train_config = tk.TrainConfig(seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, steps=STEPS)
forecasts = {
    name: tk.forecast(tk.describe(), strategy, None, train_config, ranks=1, one_document=True)
    for name, strategy in asked.items()
}
HTML(
    bars(
        [Bar(label=f"activations {name}", parts=found.parts) for name, found in forecasts.items()],
        title="Forecast: a rank's highest need",
    )
)

# %%
assert forecasts["recomputed"].parts["activations"] < forecasts["kept"].parts["activations"] / 2
assert forecasts["recomputed"].parts["optimizer"] == forecasts["kept"].parts["optimizer"]  # nothing else changes

# %% [markdown]
# Then it is trained, in this process. `tk.profile_steps` takes the recipe's own path for a few steps, and puts what was
# measured beside what was forecast. Seconds are this machine's, with whatever else it was doing.

# %%
run_config = tk.RunConfig(data="prose.txt")
trials = {name: tk.profile_steps(strategy, train_config, run_config) for name, strategy in asked.items()}
rows = []
for name, trial in trials.items():
    expected = forecasts[name].phases
    assert abs(expected["backward"] / trial.phases["backward"] - 1) < 0.08
    sizes = [
        f"{format_bytes(trial.phases[phase])} x {expected[phase] / trial.phases[phase]:.2f}"
        for phase in ("forward", "backward", "step")
    ]
    rows.append((name, *sizes, f"{trial.seconds:.2f} s", f"{trial.forecast.operations:.3g}"))
table = Table(
    title="Two trainings",
    columns=("activations", "forward", "backward", "step", "a step took", "operations"),
    rows=rows,
    notes=("Bytes and seconds are measured; x: the forecast as a multiple of that. Operations are forecast.",),
)
HTML(table.html())

# %% [markdown]
# Both learn the same, since what is computed twice comes out the same twice. And the memory that is saved is saved
# for real:

# %%
assert all(abs(one / two - 1) < 1e-4 for one, two in zip(*(trial.losses for trial in trials.values()), strict=True))
saving = trials["kept"].peak_bytes / trials["recomputed"].peak_bytes
assert saving > 1.2
f"the peak is {saving:.1f} times as high where activations are kept"

# %% [markdown]
# ## What it is good for
#
# Operations grow by less than a third, since a layer's last product, embedding, head and loss are not recomputed:
# of a small model the head is much, of an 8B model little.

# %%
from transformers import LlamaConfig

big = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)
large = tk.describe(big)


def on_eight(word, micro_batch):
    """A Llama of 8B on eight H100s: what a rank needs."""
    strategy = tk.Strategy(sharding="zero3", precision="bf16", activation_checkpointing=word)
    return tk.forecast(large, strategy, "8x H100-80GB", tk.TrainConfig(seq_len=4096, micro_batch=micro_batch))


work = {
    "5M": forecasts["recomputed"].operations / forecasts["kept"].operations,
    "8B": on_eight("full", 1).operations / on_eight("none", 1).operations,
}
assert 1.1 < work["5M"] < work["8B"] < 4 / 3
{size: f"{ratio - 1:.0%} more operations" for size, ratio in work.items()}

# %% [markdown]
# What is gained is a larger batch, or a longer sequence. Forecast for the 8B model under ZeRO-3 on eight H100s,
# rows of 4,096 tokens:

# %%
from toolkit.core.units import GiB

batches = range(1, 13)
found = {name: [on_eight(word, size) for size in batches] for name, word in words.items()}
limit = found["kept"][0].limit_bytes
HTML(
    curve(
        {
            **{
                f"activations {name}": [(one.train_config.micro_batch, one.peak_bytes / GiB) for one in each]
                for name, each in found.items()
            },
            "what an H100 has": [(size, limit / GiB) for size in batches],
        },
        title="Forecast: Llama of 8B, ZeRO-3, 8 x H100-80GB",
        x="rows of a micro-batch",
        y="highest need of a rank, GiB",
    )
)

# %%
largest = {
    name: max((one.train_config.micro_batch for one in each if one.fits), default=0) for name, each in found.items()
}
assert largest["recomputed"] > 2 * largest["kept"]
largest

# %% [markdown]
# ## Exercises
#
# 1. In `Layer`, use `nn.ReLU` in the place of GELU (`F.relu`). Which tensor is kept no longer, and why?
# 2. Let `forward` compute attention by hand, softmax(q·kᵀ)·v. How much does a layer keep then, at 128 tokens and at
#    512? Which of the two terms grows faster?
# 3. Double `BATCH`. What of the first table changes in bytes, and what in inputs?
# 4. For L = 64 find by trial the best number of segments. How far is it from √(i·L)?
# 5. Your model, your GPU: with `tk.forecast`, find the largest micro-batch with and without checkpointing. Does
#    checkpointing win tokens/s in the end?
