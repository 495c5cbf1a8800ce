# %% [markdown]
# # Activations
#
# The forward computes, and the backward asks for almost everything that the forward saw. Which tensors are kept, and
# what does it cost to compute them a second time instead?

# %% tags=["install"]
# Installs the toolkit where it is missing, as on Colab; elsewhere it does nothing. An installed torch stays as it is.
import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile


def number(version):
    """To compare versions: what is installed and newer stays, too."""
    return [int(part) for part in version.split(".") if part.isdigit()]


if importlib.util.find_spec("toolkit") is None:
    wanted = "accelerate-toolkit[all]"  # or the path of a wheel
    tested = "accelerate==1.15.0 transformers==5.23.0 peft==0.21.2 deepspeed==0.19.8 bitsandbytes==0.50.2"
    here = {str(found.metadata["Name"]).lower(): found.version for found in importlib.metadata.distributions()}
    pins = dict(pin.split("==") for pin in tested.split())
    pins = {name: pin for name, pin in pins.items() if number(here.get(name, "0")) < number(pin)}
    pins |= {"torch": here["torch"]} if "torch" in here else {}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        print(*(f"{name}=={pin}" for name, pin in pins.items()), sep="\n", file=constraints, flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", constraints.name]
        subprocess.run([*pip, wanted], check=True)

# %% [markdown]
# ## Before you start
#
# - **You know** what activations are among the parts of the memory
#   ([02_where_the_memory_goes](02_where_the_memory_goes.ipynb)), and what a Transformer's layer does.
# - **You can then** count what a layer keeps, decide whether to recompute, and find the largest batch with and without.
# - **Time** about 2 minutes on two processor cores.
# - **Hardware** a processor is enough for what is measured; its forecast is below. The 8B model is a forecast.

# %%
import toolkit as tk

tk.environment()

# %% [markdown]
# Change these values and run everything again.

# %% tags=["parameters"]
GPU = tk.hardware().device.kind == "cuda"
WIDTH = 512 if GPU else 128  # of the layer that is looked at
TOKENS = 512 if GPU else 128
BATCH = 8 if GPU else 2
DEPTHS = (4, 9, 16, 36, 64)  # layers of the stacks that are measured
REPEATS = 5  # of each timing; the shortest counts
STEPS = 6  # of each of the two runs
SEQ_LEN = 1024 if GPU else 256  # of a row in those runs
MICRO_BATCH = 8

# %% tags=["helper"]
import dataclasses
import math
import time
import warnings
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from toolkit.core.charts import curve, figure
from toolkit.core.display import Table
from toolkit.core.units import format_bytes
from toolkit.measurement import peak_memory
from toolkit.training.step_profile import StepProfiles

Path("runs").mkdir(exist_ok=True)
_ = Path("runs/prose.txt").write_text("\n\n".join(topics.values()), encoding="utf-8")
device = "cuda" if GPU else "cpu"


batch = tk.TrainConfig(seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, steps=STEPS)
KEPT = tk.Strategy(activation_checkpointing="none", precision="fp32", loss="whole")


def needs(*runs, one_document=True):
    """What a rank of the largest of these runs needs, forecast with the run's own settings for three machines.

    The text of these runs is one document.
    """
    rows = []
    for machine in ("1x cpu", "1x T4", "1x L4"):
        try:
            options = {"ranks": 1, "save": False, "num_checkpoints": 0, "one_document": one_document, "advice": False}
            forecasts = [tk.forecast(spec, strategy, machine, step, **options) for spec, strategy, step in runs]
        except tk.StrategyError as refusal:
            rows.append((machine, "–", "–", str(refusal)))
            continue
        most = max(forecasts, key=lambda forecast: forecast.needed_bytes)
        fits = "yes" if most.fits else "no"
        rows.append((machine, most.strategy.precision, format_bytes(most.needed_bytes), fits))
    columns = ("machine", "precision", "a rank needs", "fits")
    return Table(title="What this notebook's runs need", columns=columns, rows=rows)


class Layer(nn.Module):
    """Attention and an MLP, each behind a norm, each added to what came in."""

    def __init__(self, width=WIDTH, heads=4, mlp="GELU", attention="sdpa", dropout=0.0):
        super().__init__()
        self.heads, self.mlp, self.attention, self.dropout = heads, mlp, attention, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, q, k, v):
        if self.attention == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill(later, -math.inf).softmax(-1) @ v

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = self.attend(q, k, v).transpose(1, 2).reshape(b, s, h)
        x = x + F.dropout(self.out(mixed), self.dropout)
        wide = self.up(self.norm2(x))
        return x + F.dropout(self.down(F.gelu(wide) if self.mlp == "GELU" else F.relu(wide)), self.dropout)


def kept(module, run):
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
    return sorted(found.values(), key=lambda pair: -pair[1])


torch.manual_seed(0)
x = torch.randn(BATCH, TOKENS, WIDTH, device=device, requires_grad=True)
one = x.untyped_storage().nbytes()  # a layer's input: batch x tokens x width numbers


def layer_keeps(mlp, attention, dropout, checkpointed):
    layer = Layer(mlp=mlp, attention=attention, dropout=dropout).to(device)
    run = (lambda x: checkpoint(layer, x, use_reentrant=False)) if checkpointed == "yes" else layer
    found = kept(layer, run)
    rows = [(" x ".join(map(str, shape)), format_bytes(size), f"{size / one:.2f}") for shape, size in found]
    total = sum(size for _, size in found)
    rows.append(("all", format_bytes(total), f"{total / one:.2f}"))
    return Table(title="Kept by one layer for its backward", columns=("shape", "bytes", "in inputs"), rows=rows)


def inputs_kept(**options):
    """What a layer keeps, in inputs."""
    chosen = {"mlp": "GELU", "attention": "sdpa", "dropout": 0.0, "checkpointed": "no", **options}
    return float(layer_keeps(**chosen).rows[-1][2])


inner = inputs_kept()

# %% [markdown]
# The larger of the two runs further below keeps all activations:

# %%
needs(("embedded", KEPT, batch))

# %% [markdown]
# ## What one layer keeps
#
# **Your guess:** a Transformer's layer gets one tensor and gives one tensor of the same size. How many such tensors does
# it keep for its backward: two, six, sixteen?
#
# PyTorch tells which tensors a forward saves. The layer's input is the unit. Move each choice, `checkpointed` last.

# %%
options = {
    "mlp": ["GELU", "ReLU"],
    "attention": ["sdpa", "by hand"],
    "dropout": [0.0, 0.1],
    "checkpointed": ["no", "yes"],
}
first = {"mlp": "GELU", "attention": "sdpa", "dropout": 0.0, "checkpointed": "no"}
tk.vary(layer_keeps, **options, start=first, title="One layer")

# %% tags=["check"]
assert 15 < inner < 19
assert abs(inner - inputs_kept(mlp="ReLU") - 4) < 0.02  # its backward needs the output alone, which is kept anyway
assert inputs_kept(attention="by hand") > inner
assert inputs_kept(dropout=0.1) > inner
assert inputs_kept(checkpointed="yes") == 1  # the input, and nothing else

# %% [markdown]
# The MLP's two wide tensors are four units each; query, key and value are three. Korthikanti et al. (2022) count 34 bytes
# for each token and unit of width in 16 bits, dropout's masks included: 17 numbers. **Checkpointed**, the forward keeps
# the layer's input alone. In the backward the layer runs again, and only then are its tensors there.


# %% tags=["helper"]
def stack_of(layers):
    """So many layers, with gradients that exist already: they are no activations, and shall not be counted."""
    made = nn.Sequential(*(Layer() for _ in range(layers))).to(device)
    for parameter in made.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return made


def step(stack, together=None):
    """One forward and backward; `together`: how many layers are checkpointed as one. None: none are."""
    made = x
    if together is None:
        made = stack(made)
    else:
        for start in range(0, len(stack), together):
            made = checkpoint(stack[start : start + together], made, use_reentrant=False)
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
    """What is allocated above the beginning: (share of the step's events, in inputs of a layer)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    found = [total for _, total in sorted(totals(profiled.profiler.kineto_results.experimental_event_tree()))]
    return [(100 * at / len(found), (total - min(found)) / one) for at, total in enumerate(found)]


def operations(together, early_stop=True):
    """Floating-point operations of one step."""
    with FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(early_stop):
        step(deep, together)
    return counter.get_total_flops()


def seconds(together):
    """Of one step."""
    began = time.perf_counter()
    step(deep, together)
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - began


WAYS = {"nothing recomputed": None, "4 layers together": 4, "each layer": 1}
deep = stack_of(16)
step(deep)  # once before anything is measured
peaks = {name: peak(deep, together) for name, together in WAYS.items()}
lines = {name: timeline(lambda together=together: step(deep, together)) for name, together in WAYS.items()}
work = {name: operations(together) for name, together in WAYS.items()}
took = {name: min(seconds(together) for _ in range(REPEATS)) for name, together in WAYS.items()}


def through_time(checkpointed):
    base = "nothing recomputed"
    chosen = dict.fromkeys((base, checkpointed))
    rows = [
        (name, f"{peaks[name]:.0f}", f"{work[name] / work[base] - 1:+.1%}", f"{took[name] / took[base] - 1:+.0%}")
        for name in chosen
    ]
    picture = curve(
        {name: lines[name] for name in chosen},
        title="16 layers, forward and backward",
        x="progress of the step, %",
        y="in inputs of a layer",
    )
    columns = ("checkpointed", "peak, in inputs", "operations", "time here, shortest of some")
    return figure(picture, Table(columns=columns, rows=rows))


# %% [markdown]
# ## A whole stack, through time
#
# Sixteen layers go forward and backward, and torch's profiler notes every allocation and release. Without checkpoints,
# bytes climb through the forward and fall through the backward. With them, the backward is a row of small peaks: one
# recomputed piece at a time.

# %%
tk.vary(through_time, checkpointed=list(WAYS), start={"checkpointed": "each layer"})

# %% tags=["check"]
assert peaks["each layer"] < peaks["4 layers together"] < peaks["nothing recomputed"] / 2
assert max(abs(max(total for _, total in lines[name]) / peaks[name] - 1) for name in WAYS) < 0.1
again = operations(1, early_stop=False) / work["nothing recomputed"] - 1
assert abs(again - 1 / 3) < 0.02
assert 0 < work["each layer"] / work["nothing recomputed"] - 1 < again

# %% [markdown]
# Of a layer's work the forward is one part of three. Computing it again makes four: a third more. PyTorch needs a
# little less, because it stops as soon as it has what the backward asks for. Norms and activation functions count as no
# operations and still take time, so the clock says something else on each machine.

# %% tags=["helper"]
extra = peak(stack_of(1)) - inner  # gradients on their way through a layer


def formula(depth, together):
    """The peak in inputs of a layer."""
    return extra + (inner * depth if together is None else math.ceil(depth / together) + inner * together)


def segments(depth):
    """Names of the ways to cut a stack of so many layers, and the layers of a segment."""
    best = max(1, round(math.sqrt(depth / inner)))
    return {"plain": None, "m = 1": 1, "m = √L": math.isqrt(depth), "m = √(L/i)": best}


measured = {}
for depth in DEPTHS:
    stack = stack_of(depth)
    for name, together in segments(depth).items():
        measured[name, depth] = peak(stack, together)


def peak_of(layers, width_of_inside):
    """The formula's peak over the length of a segment."""
    sizes = [m for m in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if m <= layers]
    peaks = {m: math.ceil(layers / m) + width_of_inside * m for m in sizes}
    best = min(peaks, key=lambda m: peaks[m])
    rows = [
        ("no checkpoints", layers * width_of_inside),
        ("m = 1, each layer", peaks[1]),
        (f"m = {best}, the least", peaks[best]),
    ]
    picture = curve(
        {"peak": list(peaks.items())}, title=f"{layers} layers", x="m, layers of a segment", y="inputs of a layer"
    )
    return figure(picture, Table(columns=("segments", "peak, in inputs"), rows=rows))


def measured_table():
    names = list(segments(1))
    rows = [
        (depth, *(f"{measured[name, depth]:.0f} ({formula(depth, segments(depth)[name]):.0f})" for name in names))
        for depth in DEPTHS
    ]
    return Table(title="Peak in inputs of a layer: measured (formula)", columns=("layers", *names), rows=rows)


# %% [markdown]
# ## The square root of the depth
#
# Put m layers into each segment. Until the backward, the inputs of L/m segments are kept. While a segment is recomputed,
# the insides of its m layers are there. If a layer keeps i inputs, that is
#
# &emsp; L/m + i · m &emsp; inputs, least at m = √(L/i), where it is 2 · √(i · L): the **√L** of Chen et al. (2016).
#
# Move the depth, and what a layer keeps (16 above):

# %%
tk.vary(
    peak_of, layers=[8, 16, 32, 64, 128], width_of_inside=[4, 8, 16, 34], start={"layers": 64, "width_of_inside": 16}
)

# %% [markdown]
# Measured, the formula holds. And m = 1, a checkpoint for each layer, is nearly the least for every depth of today:
# that is why Transformers, and this toolkit's `activation_checkpointing="full"`, recompute layer by layer.

# %%
measured_table()

# %% tags=["check"]
errors = [size / formula(depth, segments(depth)[name]) - 1 for (name, depth), size in measured.items()]
assert max(map(abs, errors)) < 0.1
low, high = min(DEPTHS), max(DEPTHS)
grown = {name: (measured[name, high] - extra) / (measured[name, low] - extra) for name in segments(1)}
assert abs(grown["plain"] / (high / low) - 1) < 0.1  # as the depth
assert abs(grown["m = √L"] / math.sqrt(high / low) - 1) < 0.1  # as its square root
assert all(measured["m = 1", depth] < measured["m = √L", depth] for depth in DEPTHS if depth < inner**2 / 2)
assert all(measured["m = 1", depth] < 1.5 * measured["m = √(L/i)", depth] for depth in DEPTHS)

# %% tags=["helper"]
strategies = {"kept": KEPT, "recomputed": dataclasses.replace(KEPT, activation_checkpointing="full")}
trials = {
    name: tk.profile_steps(strategy, batch, tk.RunConfig(data="runs/prose.txt"))
    for name, strategy in strategies.items()
}
LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)
LLAMA_8B.save_pretrained("runs/llama-8b")


def losses(recomputed):
    chosen = {"kept": trials["kept"], "recomputed": trials["recomputed"]}
    chosen = chosen if recomputed == "both" else {recomputed: chosen[recomputed]}
    return StepProfiles(title="The embedded model of 5M parameters", trials=chosen)


# %% [markdown]
# ## In a real training
#
# The embedded model was trained for a few steps with and without. Both learned the same, since what is computed twice
# comes out the same twice. Choose what to see:

# %%
tk.vary(losses, recomputed=["both", "kept", "recomputed"], start={"recomputed": "both"}, title="Measured here")

# %% tags=["check"]
pairs = zip(trials["kept"].losses, trials["recomputed"].losses, strict=True)
assert max(abs(one_ / two - 1) for one_, two in pairs) < 1e-4
assert trials["kept"].peak_bytes > 1.2 * trials["recomputed"].peak_bytes
assert max(abs(trial.ratio - 1) for trial in trials.values()) < 0.08
# Whether a row holds several documents, which take a mask, the data and the steps decide.
needed = {needs(("embedded", KEPT, batch), one_document=each).rows[0][2] for each in (True, False)}
assert GPU or format_bytes(trials["kept"].forecast.needed_bytes) in needed
ratio = trials["recomputed"].forecast.operations / trials["kept"].forecast.operations
assert 1.1 < ratio < 4 / 3  # embedding, head and loss are not recomputed

# %% [markdown]
# And for Llama 3 8B under ZeRO-3 on eight H100, as a forecast. Find the largest micro-batch that fits, with
# `activation_checkpointing` on and off:

# %%
large = tk.describe("runs/llama-8b")
sharded = tk.Strategy(sharding="zero3", precision="bf16", activation_checkpointing="full")
rows = tk.TrainConfig(seq_len=4096, micro_batch=4)
knobs = ["activation_checkpointing", "micro_batch", "seq_len"]
tk.explore("memory", large, "8x H100-80GB", sharded, rows, controls=knobs)


# %% tags=["helper"]
def on_eight(word, size):
    strategy = tk.Strategy(sharding="zero3", precision="bf16", activation_checkpointing=word)
    return tk.forecast(large, strategy, "8x H100-80GB", tk.TrainConfig(seq_len=4096, micro_batch=size), advice=False)


def largest(word):
    """The largest micro-batch that fits, of a power of two."""
    size = 0
    while on_eight(word, size * 2 or 1).fits:
        size = size * 2 or 1
    return size


most = {word: largest(word) for word in ("none", "full")}

# %% [markdown]
# ## The rule
#
# **If activations are what does not fit, recompute them: a layer then keeps 1 input instead of 16, for up to a third
# more work.** If everything fits, do not: you would pay for nothing. Move both, for Llama 3 8B on eight H100:

# %%
print(f"Of rows of 4,096 tokens, {most['none']} fit with activations kept, {most['full']} recomputed.")
tk.vary(
    lambda activations, rows: on_eight("full" if activations == "recomputed" else "none", rows).reason,
    activations=["kept", "recomputed"],
    rows=[1, 2, 4, 8, 16, 32],
    start={"activations": "kept", "rows": 4},
    title="Does it fit?",
)

# %% tags=["check"]
assert most["full"] >= 2 * most["none"]


# %% tags=["helper"]
def train_on_frozen(reentrant):
    """A frozen embedding, as under LoRA: the input of the layers needs no gradient."""
    layer, frozen = Layer().to(device), torch.randn(BATCH, TOKENS, WIDTH, device=device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = checkpoint(layer, frozen, use_reentrant=reentrant == "yes")
    if made.requires_grad:
        made.sum().backward()
    trained, all_of = sum(p.grad is not None for p in layer.parameters()), len(list(layer.parameters()))
    warned = f" PyTorch warns: «{str(said[0].message).split('. ')[0]}»." if said else ""
    return f"{trained} of {all_of} tensors of the layer get a gradient.{warned}"


# %% [markdown]
# ## When it goes wrong
#
# You train an adapter over frozen weights, with a checkpoint around each layer, and the loss does not move. The old form
# of checkpoints (`use_reentrant=True`, still a default in many scripts) looks at the layer's *input*: where that needs no
# gradient, it gives none to the weights.

# %%
tk.vary(train_on_frozen, reentrant=["yes", "no"], start={"reentrant": "yes"})

# %% [markdown]
# Move it to `no`: the repair is `use_reentrant=False`, which is what `activation_checkpointing="full"` does here.

# %% tags=["check"]
assert train_on_frozen("yes").startswith("0 of 12")
assert train_on_frozen("no").startswith("12 of 12")

# %% [markdown]
# ## Exercises
#
# 1. Let attention be computed by hand, at 128 tokens and at 512. Which part grows faster than the tokens?
# 2. For 64 layers that keep 16 inputs each, which number of segments is the best, and how far is it from √(i · L)?
# 3. Does recomputing ever win in tokens/s? Ask a plan for the 8B model on eight H100.

# %% tags=["solution"]
heads = 4
for tokens in (128, 512):
    print(f"{tokens} tokens: scores are {heads * tokens**2 / (tokens * WIDTH):.0f} inputs, all else {inner:.0f}.")

# %% tags=["solution"]
best = min(range(1, 65), key=lambda m: math.ceil(64 / m) + 16 * m)
print(f"Segments of {best} layers, {math.ceil(64 / best)} segments; √(i · L) is {math.sqrt(16 * 64):.0f}.")

# %% tags=["solution"]
tk.plan(
    large, "8x H100-80GB", global_batch=64, seq_len=4096
)  # the first row says; a larger micro-batch can win it back

# %% [markdown]
# ## Next
#
# The other way to halve activations is to write them with fewer bits. [05_precision](05_precision.ipynb) asks what
# that costs.
