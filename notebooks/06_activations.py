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
    for event in sorted(profiled.events(), key=lambda event: event.time_range.end):
        total += event.self_cpu_memory_usage
        found.append((event.time_range.end / 1000, total / MiB))
    return found
