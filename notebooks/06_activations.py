# %% [markdown]
# # Activations: what the backward needs, and what it costs to compute it twice
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/accelerate-toolkit/blob/main/notebooks/06_activations.ipynb)
#
# The forward computes; the backward then asks for almost everything that the forward saw. This notebook counts
#
# * what one layer keeps, tensor by tensor;
# * what **activation checkpointing** does to it: keep the layer's input alone, and compute the rest a second time;
# * what that saves and costs in a real run: forecast, then measured;
# * where **O(√L)** comes from, and why Transformers are checkpointed layer by layer all the same.

# %%
# Installs the toolkit where it is missing, as on Colab; elsewhere it does nothing.
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("toolkit") is None:
    wanted = "accelerate-toolkit[all] @ git+https://github.com/OWNER/accelerate-toolkit"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", wanted], check=True)

# %%
import toolkit as tk

tk.here()

# %% tags=["parameters"]
GPU = tk.hardware().device.kind == "cuda"
WIDTH = 512 if GPU else 128  # of the layer that is looked at
TOKENS = 512 if GPU else 128
BATCH = 8 if GPU else 4
DEPTHS = (4, 9, 16, 25, 36, 64)  # layers of the stacks that are measured
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
# PyTorch tells which tensors a forward saves: `saved_tensors_hooks` is called for each. Several may share one storage, and the
# weights are there anyway, so storages are counted, each once and without the weights.

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

from toolkit.show import Table
from toolkit.units import format_bytes

rows = [
    (" x ".join(map(str, shape)), format_bytes(size), f"{size / one:.2f}")
    for shape, size in sorted(plain.values(), key=lambda kept: -kept[1])
]
inner = sum(size for _, size in plain.values()) / one
rows.append(("all", format_bytes(inner * one), f"{inner:.2f}"))
HTML(Table(title="Kept by one layer", columns=("shape", "bytes", "in inputs"), rows=rows).html())

# %% [markdown]
# The layer's input is one unit; the MLP's two wide tensors are four each; query, key and value are three. Together that is about 17
# times the input. (Korthikanti et al. 2022 count 34 bytes for each token and unit of width in 16 bits, dropout's masks included: 17
# numbers. Attention's scores would come on top; the fused kernel does not keep them.)

# %%
assert 15 < inner < 19

# %% [markdown]
# ## What checkpointing keeps
#
# The same layer through `torch.utils.checkpoint`: the forward runs without keeping anything but the input. In the backward it runs again,
# and only then are the tensors there, for this one layer.

# %%
from torch.utils.checkpoint import checkpoint

kept = saved(layer, x, lambda x: checkpoint(layer, x, use_reentrant=False))
{"plain": format_bytes(inner * one), "checkpointed": format_bytes(sum(size for _, size in kept.values()))}

# %%
assert {size for _, size in kept.values()} == {one}  # the input, and nothing else

# %% [markdown]
# ## A whole stack, through time
#
# Below, 16 layers go forward and backward, and torch's profiler notes every allocation and release. Plain, bytes climb through the forward
# and fall through the backward. Checkpointed, they stay low, and the backward is a row of small peaks: one layer at a time.

# %%
from contextlib import nullcontext

from IPython.display import display
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint_sequential

from toolkit.drawing import Bar, bars, curve, figure
from toolkit.units import MiB


def stack_of(layers):
    """So many layers, with gradients that exist already: they are no activations, and shall not be counted."""
    made = nn.Sequential(*(Layer(WIDTH) for _ in range(layers))).to(device)
    for parameter in made.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return made


def step(stack, segments=None):
    """One forward and backward; `segments`: into how many pieces the stack is cut, each checkpointed. None: nothing is."""
    with tk.phase("forward"):
        made = stack(x) if segments is None else checkpoint_sequential(stack, segments, x, use_reentrant=False)
        loss = made.square().mean()
    with tk.phase("backward"):
        loss.backward()


def timeline(run):
    """The allocator's total above its beginning, after each operator: (ms, MiB)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    total, found = 0, []
    events = sorted(profiled.events(), key=lambda event: event.time_range.end)
    for event in events:
        total += event.self_device_memory_usage if GPU else event.self_cpu_memory_usage
        found.append(((event.time_range.end - events[0].time_range.start) / 1000, total / MiB))
    return found


deep = stack_of(16)
step(deep)  # once before anything is measured
ways = {"plain": None, "checkpointed, 4 layers together": 4, "checkpointed, each layer": 16}
lines = {name: timeline(lambda segments=segments: step(deep, segments)) for name, segments in ways.items()}
HTML(curve(lines, title="16 layers, forward and backward", x="ms, with the profiler's own cost", y="MiB above the beginning"))

# %% [markdown]
# ## What it costs: a third more work
#
# Of a layer's work the forward is one part, and the backward two: it multiplies once for the input's gradient and once for the weights'. With the
# forward computed again that is four instead of three. PyTorch counts the operations:

# %%
from torch.utils.flop_counter import FlopCounterMode


def operations(segments):
    """Floating-point operations of one step."""
    with FlopCounterMode(display=False) as counter:
        step(deep, segments)
    return counter.get_total_flops()


more = operations(16) / operations(None)
f"{more - 1:.0%} more operations"

# %%
assert 1.25 < more < 4 / 3 + 0.01  # a little less than a third: the last layer is never recomputed, it is still there

# %% [markdown]
# The clock agrees, more or less: norms and activations count as no operations, and take time. The shortest of a few alternating steps counts.

# %%
import time


def seconds(segments):
    """Of one step."""
    began = time.perf_counter()
    step(deep, segments)
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - began


took = {name: [] for name in ways}
for _ in range(REPEATS):
    for name, segments in ways.items():
        took[name].append(seconds(segments))
{name: f"{1000 * min(all_of):.0f} ms, x {min(all_of) / min(took['plain']):.2f}" for name, all_of in took.items()}

# %% [markdown]
# ## O(√L)
#
# Cut a stack of L layers into k segments. Between forward and backward k inputs are kept, and while one segment is recomputed the insides of its
# L/k layers are. With a layer's inside i times as large as its input that is
#
# &emsp; k + i · L/k &emsp; inputs, least at &emsp; k = √(i · L), &emsp; where it is &emsp; 2 · √(i · L).
#
# So memory grows with the **square root** of the depth (Chen et al. 2016), and every layer is still computed only twice. Measured, as `toolkit` measures a
# run on this device, beside the formula:

# %%
import math

from toolkit import measuring


def peak(run):
    """The most that `run()` allocates above what was there before, in inputs of a layer."""
    before = torch.cuda.memory_allocated() if GPU else 0  # a CPU's window begins at nothing
    window = measuring.start(device)
    run()
    window.close()
    phases = window.result().phases
    return (max(phases["forward"], phases["backward"]) - before) / one


def formula(depth, segments):
    """The same, by the formula."""
    return inner * depth if segments is None else segments + inner * math.ceil(depth / segments)


measured, foretold = {}, {}
for depth in DEPTHS:
    stack = stack_of(depth)
    for name, segments in {
        "plain": None,
        "a segment a layer": depth,
        "√L segments": math.isqrt(depth),
        "√(i·L) segments": min(depth, round(math.sqrt(inner * depth))),
    }.items():
        measured[name, depth] = peak(lambda stack=stack, segments=segments: step(stack, segments))
        foretold[name, depth] = formula(depth, segments)
    del stack

names = list(dict.fromkeys(name for name, _ in measured))
rows = [
    (depth, *(f"{measured[name, depth]:.0f} ({foretold[name, depth]:.0f})" for name in names)) for depth in DEPTHS
]
table = Table(title="Inputs of a layer, measured (and by the formula)", columns=("layers", *names), rows=rows)
picture = curve(
    {name: [(depth, measured[name, depth]) for depth in DEPTHS] for name in names if name != "plain"},
    title="What stays below the plain stack's climb",
    x="layers",
    y="peak, in inputs of a layer",
)
HTML(figure(picture, table))

# %%
for (name, depth), found in measured.items():
    assert abs(found / foretold[name, depth] - 1) < 0.25, (name, depth)
low, high = min(DEPTHS), max(DEPTHS)
grown = {name: math.log(measured[name, high] / measured[name, low]) / math.log(high / low) for name in names}
assert 0.9 < grown["plain"] < 1.1  # as the depth
assert 0.35 < grown["√L segments"] < 0.65  # as its square root
{name: f"grows as depth to the power of {power:.2f}" for name, power in grown.items()}

# %% [markdown]
# Look at «a segment a layer»: it grows with the depth, but by one input a layer, where the plain stack grows by 17. Up to about 17 layers it is the best cut
# there is, and at 64 the best one saves little more. That is why transformers, and this toolkit's `activation_checkpointing="full"`, checkpoint
# layer by layer: it is nearly the least, and nobody has to choose k.

# %%
best = min(measured[name, high] for name in names)
assert measured["a segment a layer", high] < 1.5 * best

# %% [markdown]
# ## In a real run
#
# The embedded model (a Llama of 5M parameters) trained twice by the recipe, one process, with and without checkpointing. First the forecast, which
# launches nothing:

# %%
spec = tk.describe()
loop = tk.Loop(seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, steps=STEPS)
words = {"kept": "none", "recomputed": "full"}
asked = {name: tk.Strategy(activation_checkpointing=word) for name, word in words.items()}
forecasts = {name: tk.forecast(spec, strategy, None, loop, ranks=1) for name, strategy in asked.items()}
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
# Then the runs, one after the other, since their steps are timed:

# %%
runs = {}
for name, strategy in asked.items():
    runs[name] = tk.launch(
        "toolkit.finetune",
        strategy,
        processes=1,
        steps=STEPS,
        seq_len=SEQ_LEN,
        micro_batch=MICRO_BATCH,
        save=False,
        save_seconds=0,
        run_dir=f"runs/{name}",
    ).wait()

# %%
WINDOW = 3  # steps in which memory is measured, and which are slower on a CPU
rows = []
for name, run in runs.items():
    foretold, took = run.memory["forecast"]["device"], run.memory["measured"]
    seconds_of = sorted(run.metrics["seconds"][WINDOW if STEPS > WINDOW else 0 :])
    sizes = [f"{format_bytes(took['phases'][phase])} x {foretold['phases'][phase] / took['phases'][phase]:.2f}" for phase in ("forward", "backward", "step")]
    rows.append((name, *sizes, f"{seconds_of[len(seconds_of) // 2]:.3f} s", f"{run.memory['forecast']['operations']:.3g}"))
    assert abs(foretold["peak_bytes"] / took["peak_bytes"] - 1) < 0.05
table = Table(
    title="Two runs",
    columns=("activations", "forward", "backward", "step", "a step (median)", "operations"),
    rows=rows,
    notes=("Bytes are measured; x: the forecast as a multiple of that. Operations are forecast, and seconds measured.",),
)
HTML(table.html())

# %% [markdown]
# Both learn the same: what is computed twice comes out the same twice.

# %%
pairs = list(zip(*(run.metrics["loss"] for run in runs.values()), strict=True))
assert all(abs(one / two - 1) < 1e-5 for one, two in pairs)
assert runs["recomputed"].memory["measured"]["peak_bytes"] < runs["kept"].memory["measured"]["peak_bytes"]

# %% [markdown]
# ## What it is good for
#
# Operations grow by less than a third, since embedding, head and loss are not recomputed: of a small model they are much, of an 8B model little.

# %%
from transformers import LlamaConfig

big = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)
large = tk.describe(big)


def on_eight(word, micro_batch):
    """A Llama of 8B on eight H100s: what a rank needs."""
    strategy = tk.Strategy(sharding="zero3", precision="bf16", activation_checkpointing=word)
    return tk.forecast(large, strategy, "8x H100-80GB", tk.Loop(seq_len=4096, micro_batch=micro_batch))


work = {
    "5M": forecasts["recomputed"].operations / forecasts["kept"].operations,
    "8B": on_eight("full", 1).operations / on_eight("none", 1).operations,
}
assert 1.1 < work["5M"] < work["8B"] < 4 / 3
{size: f"{ratio - 1:.0%} more operations" for size, ratio in work.items()}

# %% [markdown]
# What is gained is a larger batch, or a longer sequence. Forecast for the 8B model under ZeRO-3 on eight H100s, rows of 4,096 tokens:

# %%
from toolkit.units import GiB

batches = range(1, 13)
found = {name: [on_eight(word, size) for size in batches] for name, word in words.items()}
limit = found["kept"][0].limit_bytes
HTML(
    curve(
        {
            **{f"activations {name}": [(one.loop.micro_batch, one.peak_bytes / GiB) for one in each] for name, each in found.items()},
            "what an H100 has": [(size, limit / GiB) for size in batches],
        },
        title="Forecast: Llama of 8B, ZeRO-3, 8 x H100-80GB",
        x="rows of a micro-batch",
        y="highest need of a rank, GiB",
    )
)

# %%
largest = {name: max((one.loop.micro_batch for one in each if one.fits), default=0) for name, each in found.items()}
assert largest["recomputed"] > 2 * largest["kept"]
largest

# %% [markdown]
# ## Exercises
#
# 1. In `Layer`, use `nn.ReLU` in the place of GELU (`F.relu`). Which tensor is kept no longer, and why?
# 2. Let `forward` compute attention by hand, softmax(q·kᵀ)·v. How much does a layer keep then, at 128 tokens and at 512? Which of the two terms grows faster?
# 3. Double `BATCH`. What of the first table changes in bytes, and what in inputs?
# 4. For L = 64 find by trial the best number of segments. How far is it from √(i·L)?
# 5. Your model, your GPU: with `tk.forecast`, find the largest micro-batch with and without checkpointing. Does checkpointing win tokens/s in the end?
