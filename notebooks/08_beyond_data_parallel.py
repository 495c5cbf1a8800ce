# %% [markdown]
# # When is sharding not enough, and what do I divide instead?
#
# Data-parallel ranks each run the *whole* model, however it is sharded. Ranks can also divide the **layers** (a
# pipeline), the **matrices** of a layer (tensor parallelism), a **sequence** (context parallelism) or the **experts**
# of a layer. Here you run all four, measure how long ranks wait, and count what they send. Each number says whether
# it was **measured**, **forecast** or **computed**.

# %%
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
# **You know**: what ZeRO and FSDP share and send ([06](06_zero_and_fsdp.ipynb)), activations
# ([04](04_activations.ipynb)) and adapters ([07](07_lora_and_qlora.ipynb)).
#
# **You can then**: say how long a pipeline waits, cut a layer over two ranks, and choose degrees for one node and for
# many.
#
# **Time**: 5 minutes on two CPU cores.
#
# **Hardware**: two ranks. First, this machine:

# %%
import toolkit as tk

tk.environment()

# %% [markdown]
# These are the numbers to change. On a machine with several GPUs the runs use them.

# %% tags=["parameters"]
GPU = tk.hardware().device.kind == "cuda" and tk.hardware().count > 1  # a pipeline takes two ranks, each with its GPU
STEPS = 10  # of each pipeline; the first three are slower, since memory is measured in them
MICRO_BATCHES = 8  # of a step
SEQ_LEN = 256
EXPERTS = 8  # of a layer, over two ranks
EXPERT_STEPS = 4
CARD = "A100-80GB"  # of the forecasts
VOCABULARY = 250_000

# %% tags=["helper"]
import itertools
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from IPython.display import HTML
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig

from toolkit.core.charts import Bar, bars, curve, figure
from toolkit.core.display import Table
from toolkit.core.units import format_bytes, format_count, format_step_seconds
from toolkit.forecasting.mesh_picture import draw_mesh
from toolkit.forecasting.stages import actions_of, schedule_picture

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
if not GPU:
    os.environ["DS_ACCELERATOR"] = "cpu"  # else DeepSpeed warns that it finds no other
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a single GPU cannot be shared by two ranks: they run on the processor
LEFT = Path("runs/08").resolve()
LEFT.mkdir(parents=True, exist_ok=True)


def table(title, columns, rows):
    """A table that shows itself."""
    return Table(title=title, columns=columns, rows=rows)


def show(chart, title, columns, rows):
    """A picture and its table."""
    return HTML(figure(chart, table(title, columns, rows)))


def needs(*runs, one_document=False):
    """What a rank of the largest of these runs needs, forecast with the run's own settings for three machines."""
    rows = []
    for machine in ("2x cpu", "2x T4", "2x L4"):
        try:
            options = {"ranks": 2, "save": False, "num_checkpoints": 0, "one_document": one_document, "advice": False}
            forecasts = [tk.forecast(spec, strategy, machine, step, **options) for spec, strategy, step in runs]
        except tk.StrategyError as refusal:
            rows.append((machine, "–", "–", str(refusal)))
            continue
        most = max(forecasts, key=lambda forecast: forecast.needed_bytes)
        fits = "yes" if most.fits else "no"
        rows.append((machine, most.strategy.precision, format_bytes(most.needed_bytes), fits))
    columns = ("machine", "precision", "a rank needs", "fits")
    return Table(title="What this notebook's runs need", columns=columns, rows=rows)


def llama(layers, hidden, inner, heads, vocabulary=32_000, kv=8):
    """A Llama's description."""
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    return tk.describe(
        LlamaConfig(**shape, num_hidden_layers=layers, num_key_value_heads=kv, vocab_size=vocabulary,
                    max_position_embeddings=32_768)
    )  # fmt: skip


LLAMA_8B = llama(32, 4096, 14_336, 32, 128_256)
BATCH = tk.TrainConfig(micro_batch=1, accumulation=8, seq_len=4096)
ROWS_A_STEP = 128


def machine(ranks, card=CARD):
    """A name with 8 GPUs a node."""
    return f"{ranks}x {card}" if ranks <= 8 else f"{ranks // 8} nodes x 8x {card}"


def job_of(strategy, ranks, config=BATCH, spec=LLAMA_8B):
    """A request without open values, for ranks of the card."""
    return tk.resolve(spec, strategy, machine(ranks), config, ranks=ranks)


SHOWN = ["L40S", "A100-80GB", "H100-80GB"]


def within_over_across(name):
    """How many times as fast a card's link within a node is as its part of the network."""
    card = tk.hardware(name).device.card
    return f"{card.peer / card.network:.0f}"


def mesh_of(job):
    """The picture of a job's mesh."""
    stages = [{"layers": cut} for cut in job.settings.get("stages", ())]
    return HTML(draw_mesh(job.parallelism, {"stages": stages} if stages else None))


# %% [markdown]
# The largest run is the pipeline that keeps all rows of a step at once. (On a T4 the sentence is what a run would say,
# too.) The other runs on two ranks need less:

# %%
ALL_ROWS = tk.TrainConfig(micro_batch=MICRO_BATCHES, seq_len=SEQ_LEN)
needed = needs(("embedded", tk.Strategy(pp=2, pp_schedule="gpipe", activation_checkpointing="none"), ALL_ROWS))
needed

# %% [markdown]
# **Your guess**, before you run on. Two ranks hold half of the layers each, and one batch passes through. What share
# of the time does a rank wait? And a layer is divided over two ranks: how many all-reduces does a step of one layer
# take?
#
# ## Who holds what
#
# 32 GPUs as 4 stages × 4 slices × 2 copies. Stages are *layers*, slices are parts of *each matrix* in them, copies
# read other samples. Token ids enter at the first stage, and labels are needed at the last one alone. Move the degrees:


# %%
def mesh(stages, slices, copies):
    if stages == slices == 1:
        return "Ranks share neither layers nor matrices: each holds the whole model."
    strategy = tk.Strategy(sharding="fsdp" if copies > 1 else "none", pp=stages, tp=slices)
    return mesh_of(job_of(strategy, stages * slices * copies))


tk.vary(mesh, stages=[1, 2, 4, 8], slices=[1, 2, 4, 8], copies=[1, 2, 4], start={"stages": 4, "slices": 4, "copies": 2})

# %% [markdown]
# The ranks of one layer's slices exchange most, so they are neighbours, in one node. Stages exchange least.
#
# ## A pipeline, and what it waits for
#
# **Naive**: one batch passes through both stages, and back. One rank computes, the other waits. **GPipe** (Huang et
# al. 2019) divides the batch into micro-batches: all forwards, then all backwards. **1F1B** begins a backward as soon
# as it can, so that fewer micro-batches are in flight. **Interleaved**: each rank holds two shorter stages. Here each
# trains for real, on two ranks, with the same rows in every step.

# %%
rows_of = {"naive": ("gpipe", 1), "gpipe": ("gpipe", MICRO_BATCHES)}
rows_of |= {"1f1b": ("1f1b", MICRO_BATCHES), "interleaved": ("interleaved", MICRO_BATCHES)}
fields = {"steps": STEPS, "seq_len": SEQ_LEN, "save": False, "save_seconds": 0, "processes": 2}
runs = {}
for name, (schedule, count) in rows_of.items():
    strategy = tk.Strategy(pp=2, pp_schedule=schedule, activation_checkpointing="none", loss="whole")
    batch = {"micro_batch": MICRO_BATCHES // count, "accumulation": count}
    runs[name] = tk.launch("toolkit.finetune", strategy, guard=False, **batch, **fields).wait(progress=False)

# %% [markdown]
# How long does a rank wait? **Measured** is the share of a step outside forward and backward, **forecast** the played
# schedule with the stages' own times, **computed** (p − 1) / (v·m + p − 1) of p equal stages, m micro-batches and v
# stages a rank. In flight: the first rank keeps activations of so many micro-batches at once.

# %% tags=["helper"]
forecasts = {name: run.memory["forecast"]["pipeline"] for name, run in runs.items()}
ran = {name: run.memory["schedule"] for name, run in runs.items()}
idle = {name: sum(schedule["idle"]) / len(schedule["idle"]) for name, schedule in ran.items()}

# %%
rows = []
for name, need in forecasts.items():
    shares = (f"{share:.0%}" for share in (idle[name], need["idle_share"], need["equal_stages_idle_share"]))
    flight = need["stages"][0]["in_flight"]
    rows.append((name, format_step_seconds(ran[name]["length"]), *shares, flight))
columns = ("schedule", "a step, measured", "idle, measured", "forecast", "computed", "in flight")
table(f"Two ranks, {MICRO_BATCHES} rows a step", columns, rows)

# %% tags=["check"]
assert forecasts["1f1b"]["idle_share"] < forecasts["naive"]["idle_share"]
assert all(0 < share < 1 for share in idle.values())
for name, need in forecasts.items():
    v = 2 if name == "interleaved" else 1
    assert abs(need["equal_stages_idle_share"] - 1 / (v * rows_of[name][1] + 1)) < 1e-12
assert forecasts["1f1b"]["stages"][0]["in_flight"] == 2
assert forecasts["gpipe"]["stages"][0]["in_flight"] == MICRO_BATCHES
most_needed = max(run.memory["forecast"]["device"]["needed_bytes"] for run in runs.values())
# Whether a row holds several documents, which take a mask, the data and the steps decide.
ours = {"pp": 2, "activation_checkpointing": "none", "loss": "whole"}
steps = [tk.TrainConfig(micro_batch=MICRO_BATCHES // n, accumulation=n, seq_len=SEQ_LEN) for _, n in rows_of.values()]
schedules = [tk.Strategy(pp_schedule=schedule, **ours) for schedule, _ in rows_of.values()]
requests = [("embedded", *each) for each in zip(schedules, steps, strict=True)]
either = {needs(*requests, one_document=each).rows[0][2] for each in (True, False)}
assert GPU or format_bytes(most_needed) in either
lasts = [run.steps()[-1]["loss"] for run in runs.values()]
assert max(lasts) / min(lasts) - 1 < 1e-4  # the same training

# %% [markdown]
# The guess: half of the time, and no schedule changes a loss. The formula is of equal stages. These are not: the last
# one has the head, so ranks wait longer. `interleaved` has fewer layers a stage: it may gain nothing in so small a
# model. Below is one step, **forecast over measured**. Yellow
# waits for its first micro-batch, orange between two, grey after its last.


# %%
def a_step(schedule):
    return HTML(schedule_picture(forecasts[schedule], ran[schedule]))


tk.vary(a_step, schedule=list(runs), start={"schedule": "1f1b"})

# %% [markdown]
# ## How many micro-batches?
#
# More of them, and ranks wait less. Play the schedules without a run. A forward takes a
# second here, a backward two:

# %% tags=["helper"]
SMALL = llama(32, 64, 128, 4, 256, 4)


def play(stages, micro, kind):
    """The schedule of equal stages."""
    strategy = tk.Strategy(pp=stages, pp_schedule=kind)
    config = tk.TrainConfig(accumulation=micro)
    job = tk.resolve(SMALL, strategy, f"{stages}x cpu", config)
    return job.engine.play(job, [(1.0, 2.0)] * len(job.settings["stages"]))


def draw_schedule(played, kind):
    stages = [{"rank": rank, "idle": share} for rank, share in enumerate(played.idle)]
    about = {"actions": actions_of(played), "length": played.length, "idle_share": played.idle_share}
    return schedule_picture({**about, "stages": stages, "schedule": kind, "timed": True})


# %%
def played_schedule(stages, micro_batches, kind):
    return HTML(draw_schedule(play(stages, micro_batches, kind), kind))


KINDS = ["gpipe", "1f1b", "interleaved", "zero_bubble"]
COUNTS = [2, 4, 8, 16, 32]
START = {"stages": 4, "micro_batches": 8, "kind": "1f1b"}
tk.vary(played_schedule, stages=[2, 4, 8], micro_batches=COUNTS, kind=KINDS, start=START)

# %% tags=["check"]
for stages, micro in itertools.product((2, 4, 8), (8, 16, 32)):
    for kind in ("gpipe", "1f1b"):
        assert abs(play(stages, micro, kind).idle_share - (stages - 1) / (micro + stages - 1)) < 1e-9
    assert play(stages, micro, "interleaved").idle_share < play(stages, micro, "1f1b").idle_share

# %% [markdown]
# But a step has a fixed number of rows: more micro-batches are smaller ones, and a GPU computes small matrices less
# well. Which number is best? A step of 64 rows of a Llama with 24 layers, GPipe, by forecast. Move the tokens of a
# row:

# %% tags=["helper"]
LLAMA_1B = llama(24, 2048, 5632, 16, 32_000, 16)
ROWS = 64


def seconds_of(stages, micro, tokens):
    """A step of 64 rows, by forecast."""
    config = tk.TrainConfig(micro_batch=ROWS // micro, accumulation=micro, seq_len=tokens)
    strategy = tk.Strategy(
        pp=stages, pp_schedule="gpipe", activation_checkpointing="none", loss="whole", precision="bf16"
    )
    return tk.forecast(LLAMA_1B, strategy, machine(stages), config, ranks=stages, advice=False).step_seconds


# %%
def best_number(tokens):
    counts, rows, times = [4, 8, 16, 32, 64], [], {}
    for stages in (4, 8):
        each = [1000 * seconds_of(stages, micro, tokens) for micro in counts]
        times[f"p = {stages}"] = list(zip(counts, each, strict=True))
        rows.append((stages, *(f"{ms:.0f} ms" for ms in each), counts[each.index(min(each))]))
    chart = curve(times, title=f"{ROWS} rows of {tokens} tokens", x="micro-batches", y="ms a step")
    return show(chart, "A step (forecast)", ("stages p", *(f"m = {m}" for m in counts), "best m"), rows)


tk.vary(best_number, tokens=[128, 512, 2048], ahead=True)

# %% [markdown]
# Few micro-batches leave ranks waiting; many are too small for the card.
#
# ## A layer over two ranks
#
# **Tensor parallelism** (Shoeybi et al. 2019) cuts pairs of matrices: the first by **columns**, so that each rank has
# some of the heads, or some of the MLP's units; the second by **rows**, so that each rank has a summand of the output.
# Two functions make it exact. **f** does nothing forward and sums gradients backward; **g** sums forward and does
# nothing backward. Each sum is an all-reduce:


# %%
class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return all_reduced(gradient, "f, backward")


# %% [markdown]
# And the other one:


# %%
class G(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return all_reduced(x, "g, forward")

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# %% [markdown]
# A whole layer, attention and MLP, takes each of them twice. `heads` are those of this rank:

# %% tags=["helper"]
COUNTED = []


def all_reduced(tensor, what):
    tensor = tensor.contiguous().clone()
    dist.all_reduce(tensor)
    COUNTED.append(what)
    return tensor


def attention(x, q, k, v, heads):
    """Attention of some heads [batch, tokens, width]."""
    cut = [(x @ weight).unflatten(-1, (heads, -1)).transpose(1, 2) for weight in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(*cut, is_causal=True).transpose(1, 2).flatten(2)


# %%
def layer(x, q, k, v, o, up, down, heads, f=F.apply, g=G.apply):
    x = x + g(attention(f(x), q, k, v, heads) @ o)
    return x + g(torch.nn.functional.gelu(f(x) @ up) @ down)


def cut_layer(x, weights, heads, rank, ranks):
    q, k, v, o, up, down = weights
    columns = {"q": q, "k": k, "v": v, "up": up}
    parts = {name: weight.chunk(ranks, dim=1)[rank] for name, weight in columns.items()}
    parts |= {name: weight.chunk(ranks, dim=0)[rank] for name, weight in (("o", o), ("down", down))}
    return layer(x, **parts, heads=heads // ranks)


# %% [markdown]
# On two ranks, for real: is the output the whole layer's, and its input's gradient? And what does the toolkit's own
# `--tp 2` all-reduce in each layer of a model?

# %% tags=["helper"]
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.data.embedded import embedded_model

FOLDER = str(embedded_model())


class AllReduces(TorchDispatchMode):
    """Counts all-reduces of tensors with three dimensions: hidden states, or their gradients."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "all_reduce" in str(function) or "allreduce" in str(function):
            first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            self.count += first.dim() == 3
        return function(*args, **(kwargs or {}))


def all_reduces_of_a_layer(model, ids):
    """All-reduces of hidden states in the forward and in the backward of the model's third layer."""
    layers, seen = model.model.layers, {"forward": [], "backward": []}
    with AllReduces() as mode:

        def note(module, args, output):
            seen["forward"].append(mode.count)
            output.register_hook(lambda gradient: seen["backward"].append(mode.count))

        for layer in layers[1:3]:
            layer.register_forward_hook(note)
        model(input_ids=ids, labels=ids).loss.backward()
    return [second - first for first, second in seen.values()]


def by_hand():
    """The cut layer and the whole one: largest differences of output and gradient, and the all-reduces."""
    torch.manual_seed(0)
    shapes = [(64, 64)] * 4 + [(64, 256), (256, 64)]
    weights, x = [torch.randn(shape) / 8 for shape in shapes], torch.randn(2, 16, 64)
    results = []
    for cut in (False, True):
        given = x.clone().requires_grad_()
        nothing = {"f": lambda x: x, "g": lambda x: x}
        if cut:
            output = cut_layer(given, weights, 4, dist.get_rank(), dist.get_world_size())
        else:
            output = layer(given, *weights, heads=4, **nothing)
        output.square().mean().backward()
        results.append((output.detach(), given.grad))
    return [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]


def two_ranks(out):
    accelerator = tk.accelerator(spec=tk.describe(FOLDER))
    model, _ = tk.load(accelerator)
    apart = by_hand()
    counts = all_reduces_of_a_layer(model, torch.arange(64, device=accelerator.device)[None] + 3)
    if accelerator.is_main_process:
        Path(out).write_text(json.dumps({"apart": apart, "by_hand": COUNTED, "counts": counts}))


# %%
out = LEFT / "tensor.json"
strategy = tk.Strategy(tp=2, precision="fp32", activation_checkpointing="none")
tk.launch(two_ranks, strategy, processes=2, args=(str(out),)).wait(progress=False)
told = json.loads(out.read_text())
forward, backward = told["counts"]
hand = [told["by_hand"].count(what) for what in ("g, forward", "f, backward")]
rows = [("by hand", *hand, f"{max(told['apart']):.0e}")]
rows.append(("toolkit, --tp 2", forward, backward, "–"))
table("All-reduces of a layer (counted)", ("layer", "forward", "backward", "largest difference"), rows)

# %% tags=["check"]
assert max(told["apart"]) < 1e-4
assert hand == [2, 2]
assert forward == 2
assert backward == 2

# %% [markdown]
# The guess: two in the forward and two in the backward, of a whole hidden state each. Products of one input share a
# sum: q, k and v, and gate and up. None can be hidden, since the next product waits for it. How much is it? A ring of
# R ranks sends 2·(R − 1)/R of what it sums:


# %%
def sent_by_a_layer(ranks, tokens):
    each = 2 * (ranks - 1) / ranks * 2 * tokens * LLAMA_8B.hidden
    rows = [Bar(label=f"--tp {ranks}", parts={"in the forward": forward * each, "in the backward": backward * each})]
    return HTML(bars(rows, title=f"A layer of a Llama of 8B, {ranks} ranks: sent by a rank (computed)"))


tk.vary(sent_by_a_layer, ranks=[2, 4, 8, 16], tokens=[1024, 4096, 16_384], start={"ranks": 8, "tokens": 4096})

# %% [markdown]
# For each layer and each micro-batch. So the link decides.
#
# ## Within a node, and across
#
# The Llama of 8B on 16 GPUs, two nodes, 128 rows a step: fewer copies run more micro-batches. Up to `--tp 8`
# all-reduces stay within a node; with 16 they cross. Move the card: A100 have NVLink, L40S have PCIe.


# %%
def slices(card):
    rows = []
    for tp in (1, 8, 16):
        strategy = tk.Strategy(sharding="fsdp" if tp < 16 else "none", tp=tp, precision="bf16")
        batch = tk.TrainConfig(micro_batch=1, accumulation=ROWS_A_STEP * tp // 16, seq_len=4096)
        need = tk.forecast(LLAMA_8B, strategy, f"2 nodes x 8x {card}", batch, ranks=16, advice=False)
        step, speed = format_step_seconds(need.step_seconds), f"{need.tokens_per_second:,.0f}"
        rows.append((tp, 16 // tp, format_bytes(need.communication_bytes), step, speed))
    return table(f"16 {card}, by forecast", ("tp", "dp", "a rank sends", "a step", "tokens/s"), rows)


tk.vary(slices, card=["A100-80GB", "H100-80GB", "L40S"], start={"card": "A100-80GB"}, ahead=True)

# %% [markdown]
# ## One dimension, two, or three
#
# Columns and rows are one way to cut: **1-D**, where every rank keeps whole hidden states. Ranks can also stand in a
# square (**2-D**, SUMMA), in several squares (**2.5-D**) or in a cube (**3-D**), and cut inputs and outputs as well.
# What does a rank receive in the forward of an MLP, on 64 ranks? Move the tokens and the width:

# %% tags=["helper"]
RANKS = 64
WAYS = ("1-D", "2-D", "2.5-D", "3-D")


def received(way, tokens, width, ranks=RANKS, depth=4):
    """Elements that a rank receives in the forward of an MLP, width → 4·width → width, and what it keeps of hidden states."""
    if way == "1-D":  # a ring's all-reduce of the output
        return 2 * (ranks - 1) / ranks * tokens * width, tokens * width
    inputs, outputs, weights = 5 * tokens * width, 5 * tokens * width, 8 * width**2
    if way == "2-D":  # blocks of inputs along rows, blocks of weights along columns
        side = ranks**0.5
        return (side - 1) / ranks * (inputs + weights), tokens * width / ranks
    if way == "2.5-D":  # the same in `depth` squares, each with its part of the tokens and a copy of the weights
        side = (ranks / depth) ** 0.5
        return (side - 1) / ranks * (inputs + depth * weights), tokens * width / ranks
    side = round(ranks ** (1 / 3))  # inputs, weights and outputs, each along one dimension of the cube
    return (side - 1) / ranks * (inputs + weights + outputs), tokens * width / ranks


# %%
def volumes(tokens, width):
    rows = [(way, *received(way, tokens, width)) for way in WAYS]
    chart = bars([Bar(label=way, parts={"received": 2 * size}) for way, size, _ in rows], title="Received, in bf16")
    cells = [(way, format_bytes(2 * size), format_bytes(2 * kept)) for way, size, kept in rows]
    return show(chart, f"An MLP on {RANKS} ranks (computed)", ("cut", "a rank receives", "keeps of its input"), cells)


TOKENS = [1024, 4096, 16_384, 65_536]
tk.vary(volumes, tokens=TOKENS, width=[1024, 4096, 12_288], start={"tokens": 16_384, "width": 4096})

# %% tags=["check"]


def blocks(matrix, rows, columns):
    """A matrix as a grid of blocks."""
    return [part.chunk(columns, dim=1) for part in matrix.chunk(rows, dim=0)]


def summa(x, w, side, got):
    """2-D: in each turn a column of input blocks goes along rows, and a row of weight blocks along columns."""
    xs, ws = blocks(x, side, side), blocks(w, side, side)
    ys = [[0] * side for _ in range(side)]
    for turn, row, column in itertools.product(range(side), repeat=3):
        got[row, column] += (turn != column) * xs[row][turn].numel() + (turn != row) * ws[turn][column].numel()
        ys[row][column] = ys[row][column] + xs[row][turn] @ ws[turn][column]
    return torch.cat([torch.cat(list(row), dim=1) for row in ys])


def cube(x, w, side, got):
    """3-D: rank (i, j, k) computes block (i, j) of the product over part k; blocks are gathered, and the sum is scattered."""
    xs, ws = blocks(x, side, side), blocks(w, side, side)
    ys = [[0] * side for _ in range(side)]
    for i, j, k in itertools.product(range(side), repeat=3):
        part = xs[i][k] @ ws[k][j]
        got[i, j, k] += (side - 1) / side * (xs[i][k].numel() + ws[k][j].numel() + part.numel())
        ys[i][j] = ys[i][j] + part
    return torch.cat([torch.cat(list(row), dim=1) for row in ys])


def mlp(multiply, x, a, b, side, got):
    return multiply(multiply(x, a, side, got), b, side, got)


torch.manual_seed(0)
small, wide = 64, 32
x, a, b = torch.randn(small, wide), torch.randn(wide, 4 * wide) / 8, torch.randn(4 * wide, wide) / 8
for way, multiply, shape in (("2-D", summa, (8, 8)), ("3-D", cube, (4, 4, 4))):
    got = torch.zeros(shape)
    assert torch.allclose(mlp(multiply, x, a, b, shape[0], got), x @ a @ b, atol=1e-4)
    assert got.max() == got.min() == received(way, small, wide)[0]
got = torch.zeros(4, 4, 4)  # 2.5-D: four squares
parts = [mlp(summa, part, a, b, 4, own) for own, part in zip(got, x.chunk(4), strict=True)]
assert torch.allclose(torch.cat(parts), x @ a @ b, atol=1e-4)
assert got.max() == got.min() == received("2.5-D", small, wide)[0]

# %% [markdown]
# With many tokens 1-D receives most, and it keeps whole hidden states. With few, the weights of the others weigh more.
# 1-D is what libraries run: it fits plain layers, and stays within a node.
#
# ## Stages of equal time, not of equal layers
#
# A vocabulary of 250,000 makes the *head* as large as many blocks. The embedding is as large, and takes no time: it is
# a lookup. The toolkit cuts by time. Move the vocabulary:


# %% tags=["helper"]
def four_stages(vocabulary):
    """The stages of a BLOOM of 24 layers, by forecast."""
    spec = tk.describe(BloomConfig(hidden_size=1024, n_layer=24, n_head=16, vocab_size=vocabulary))
    config = tk.TrainConfig(micro_batch=1, accumulation=8, seq_len=2048)
    return tk.forecast(spec, tk.Strategy(pp=4), machine(4), config, ranks=4, advice=False).pipeline


# %%
def balance(vocabulary):
    need = four_stages(vocabulary)
    rows = []
    for number, stage in enumerate(need.stages):
        first, end = stage.layers
        time = format_step_seconds(stage.forward + stage.backward)
        rows.append((number, end - first, format_bytes(stage.weight_bytes), format_bytes(stage.peak_bytes), time))
    title = f"The slowest stage takes {need.slowest_over_mean:.2f} of the mean"
    return table(title, ("stage", "layers", "weights", "peak", "a micro-batch"), rows)


tk.vary(balance, vocabulary=[32_000, 128_000, VOCABULARY], start={"vocabulary": VOCABULARY}, ahead=True)

# %% tags=["check"]
wide = four_stages(VOCABULARY)
layers = [end - first for first, end in (stage.layers for stage in wide.stages)]
assert sum(layers) == 24
assert layers[-1] < min(layers[:-1])
assert wide.slowest_over_mean <= 1.1

# %% [markdown]
# ## 4 × 6 GB is not 24 GB
#
# A model of 24 GB, half precision, on four cards of 6 GB each. A layer is on one card or on another, CUDA's own memory
# is on every one, and nothing is left for a forward. (Here 1 GB is 10⁹ bytes. Forecasts and pictures are in GiB, 2³⁰
# bytes, 7% more.) Move the cards:

# %% tags=["helper"]
MODEL_24 = llama(38, 4992, 13_824, 39, 32_000, 39)  # 12B parameters
CUDA = tk.forecast("embedded", tk.Strategy(), "T4", ranks=1, advice=False).context["CUDA context"]


def slots_of(spec):
    """Bytes of the embedding, each block and the head, in half precision and in order."""
    sizes = {}
    for parameter in spec.parameters:
        words = parameter.name.split(".")
        slot = int(words[words.index("layers") + 1]) if "layers" in words else -1 if "embed" in parameter.name else 1000
        sizes[slot] = sizes.get(slot, 0) + 2 * parameter.elements
    return [sizes[slot] for slot in sorted(sizes)]


def filled(sizes, room):
    """Cards in order, each with as many slots as it has room for."""
    cards = [0]
    for size in sizes:
        cards = [*cards, size] if cards[-1] + size > room else [*cards[:-1], cards[-1] + size]
    return cards


# %%
def cards_of(gigabytes, count):
    room = gigabytes * 10**9 - CUDA
    cards = filled(slots_of(MODEL_24), room)
    rows = [Bar(label=f"card {n}", parts={"weights": size, "CUDA": CUDA}) for n, size in enumerate(cards)]
    said = "fits" if len(cards) <= count else "does not fit"
    title = f"{count} × {gigabytes} GB, 24 GB of weights: {said}, {len(cards)} cards are needed"
    return HTML(bars(rows, title=title, limit=gigabytes * 10**9, limit_label="a card has"))


tk.vary(cards_of, gigabytes=[6, 8, 12, 24], count=[1, 2, 3, 4, 5, 6], start={"gigabytes": 6, "count": 4})

# %% [markdown]
# And this is only to *hold* it. 45 GB of weights fit on four cards of 40 GB. To train them with AdamW takes a gradient,
# two moments and a master for each:

# %% tags=["helper"]
MODEL_45 = llama(49, 6144, 16_384, 48, 32_000, 48)

# %%
rows = []
for precision, adapter in (("bf16", "none"), ("bf16_pure", "none"), ("bf16", "lora")):
    strategy = tk.Strategy(pp=4, precision=precision, adapter=adapter)
    need = tk.forecast(MODEL_45, strategy, "4x A100-40GB", BATCH, ranks=4, advice=False)
    fits = "yes" if need.fits else "no"
    rows.append((precision, adapter, format_bytes(need.needed_bytes), format_bytes(need.limit_bytes), fits))
columns = ("precision", "adapter", "the fullest needs", "a card has", "fits")
table(f"{format_count(MODEL_45.elements)} on 4 A100 of 40 GB, --pp 4 (forecast)", columns, rows)

# %% tags=["check"]
assert abs(2 * MODEL_45.elements / 45e9 - 1) < 0.02
assert abs(sum(slots_of(MODEL_24)) / 24e9 - 1) < 0.02
assert sum(slots_of(MODEL_45)) == 2 * MODEL_45.elements
assert len(filled(slots_of(MODEL_24), 6 * 10**9 - CUDA)) > 4
assert [row[-1] for row in rows] == ["no", "no", "yes"]

# %% [markdown]
# ## A sequence over ranks
#
# **Context parallelism** gives each rank a part of every sequence; they exchange keys and values in attention alone.
# With a causal mask a later token looks at more: equal parts are unequal work. In a **zigzag** each rank takes one
# early part and one late part. Move the ranks:

# %% tags=["helper"]


def parts_of(ranks, order):
    """Of 2R parts of a sequence, those of each rank."""
    zigzag = [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]
    return zigzag if order == "zigzag" else [(2 * rank, 2 * rank + 1) for rank in range(ranks)]


def pairs_of(ranks, order, tokens=4096):
    """Pairs of a query and a key that it sees, of each rank."""
    size = tokens // (2 * ranks)
    return [sum(size * size * part + size * (size + 1) // 2 for part in own) for own in parts_of(ranks, order)]


# %%
def work_of_ranks(ranks, order):
    pairs = pairs_of(ranks, order)
    rows = [Bar(label=f"rank {rank}", parts={"pairs": each}) for rank, each in enumerate(pairs)]
    title = f"{order}: the fullest rank has {max(pairs) * ranks / sum(pairs):.2f} of the mean"
    return HTML(bars(rows, title=title, spell="{:,.0f}".format))


tk.vary(work_of_ranks, ranks=[2, 4, 8, 16], order=["in order", "zigzag"], start={"ranks": 4, "order": "in order"})

# %% tags=["check"]
mask = torch.ones(4096, 4096, dtype=torch.bool).tril()
for order in ("in order", "zigzag"):
    rows_of_parts = mask.chunk(8)
    assert pairs_of(4, order) == [sum(int(rows_of_parts[part].sum()) for part in own) for own in parts_of(4, order)]
assert len(set(pairs_of(8, "zigzag"))) == 1

# %% [markdown]
# A kernel that computes masked pairs too gains nothing from a zigzag. `--cp` exchanges heads where it can (Ulysses):
# each rank then sees whole rows, and work is equal without one. Is a divided sequence the same training? The
# guard trains a small copy in one process and over ranks:

# %%
divided = tk.guard("embedded", tk.Strategy(sharding="fsdp", cp=2), ranks=2)
divided

# %% [markdown]
# ## Experts over ranks
#
# A layer with experts sends each token to the few that a router chooses. With `--ep 2` each rank holds half of the
# experts, and tokens travel. What if one expert is chosen by most? A small Mixtral, for real:

# %% tags=["helper"]
from transformers import MixtralConfig

from toolkit.data import embedded_tokenizer

mixture = LEFT / "mixture"
embedded_tokenizer(mixture)
config = MixtralConfig(
    vocab_size=4096, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=2, max_position_embeddings=1024,
)  # fmt: skip
torch.manual_seed(0)
AutoModelForCausalLM.from_config(config).save_pretrained(mixture)

# %%
strategy = tk.Strategy(sharding="fsdp", ep=2, activation_checkpointing="none")
batch = {"seq_len": SEQ_LEN, "micro_batch": 4, "accumulation": 1}
fields = {"steps": EXPERT_STEPS, "save": False, "save_seconds": 0, "guard": False, "model": str(mixture)}
routed = tk.launch("toolkit.finetune", strategy, processes=2, **batch, **fields).wait(progress=False)


# %% [markdown]
# Tokens of each layer's experts, in a step:


# %%
def load_of_experts(step):
    layers = enumerate(zip(*(loads[step][name] for name in ("tokens", "most", "idle")), strict=True))
    rows = [(n, f"{tokens:,.0f}", f"{most:.2f}", f"{idle:.0%}") for n, (tokens, most, idle) in layers]
    columns = ("layer", "tokens of an expert", "the fullest, over the mean", "experts without a token")
    return table(f"Step {step} (measured)", columns, rows)


loads = {event["step"]: event["experts"] for event in routed.steps()}
tk.vary(load_of_experts, step=list(loads))

# %% tags=["check"]
assert divided.agrees
assert routed.memory["measured"]["peak_bytes"] < most_needed
assert all(most >= 1 for step in loads.values() for most in step["most"])
assert all(len(loads[1][name]) == 4 for name in ("tokens", "most", "idle"))
assert loads[1]["tokens"][0] * EXPERTS == 2 * 2 * SEQ_LEN * 4

# %% [markdown]
# The rank of the fullest expert takes the longest, and all others wait for it: that is why routers are trained with a
# loss that spreads the tokens.
#
# ## All of it together
#
# **3-D**: stages × slices × copies. Does a small model compute on eight ranks what it computes on one?

# %%
cube_of_eight = tk.guard("embedded", tk.Strategy(sharding="fsdp", pp=2, tp=2), ranks=8)
cube_of_eight

# %% [markdown]
# And what do 32 ranks send for the same rows? **ZeRO-3** gathers all parameters twice in every micro-batch. **3-D with
# ZeRO-1** sends hidden states between stages and within layers, and gradients once a step. So does a **pipeline with
# ZeRO-1**; with **ZeRO-2** it would reduce-scatter gradients after *every* micro-batch. Move the rows of a step:

# %% tags=["helper"]


def transfers(strategy, micro):
    """(bytes, link, what) of each kind of transfer of a step on 32 ranks."""
    config = tk.TrainConfig(micro_batch=1, accumulation=micro, seq_len=4096)
    sent = job_of(strategy, 32, config).communication()
    return [(each.size * each.times, each.link, each.what) for each in sent]


def gradients_of(sent):
    """Bytes of gradients that are reduced."""
    return sum(size for size, _, what in sent if "gradient" in what and "reduce" in what and "tied" not in what)


PARTS = {"within a layer": ("tp",), "between stages": ("pp",), "parameters and gradients": ("ring", "replicas")}


def by_part(label, sent, more=0):
    """A bar from transfers; `more` bytes of gradients."""
    sizes = {part: sum(size for size, link, _ in sent if link in links) for part, links in PARTS.items()}
    return Bar(label=label, parts=sizes | {"parameters and gradients": sizes["parameters and gradients"] + more})


# %%
def sent_by_a_rank(rows):
    zero3 = transfers(tk.Strategy(sharding="zero3", precision="bf16"), rows // 32)
    three_d = transfers(tk.Strategy(sharding="fsdp", pp=4, tp=4, precision="bf16"), rows // 2)
    stages = transfers(tk.Strategy(sharding="fsdp", pp=4, precision="bf16"), rows // 8)
    again = (rows // 8 - 1) * gradients_of(stages)
    drawn = [by_part("ZeRO-3", zero3), by_part("3-D with ZeRO-1", three_d), by_part("pipeline with ZeRO-1", stages)]
    drawn.append(by_part("pipeline with ZeRO-2", stages, again))
    return HTML(bars(drawn, title=f"Sent by a rank for {rows} rows, 32 ranks, Llama 8B (computed)"))


tk.vary(sent_by_a_rank, rows=[64, 128, 256, 512], start={"rows": 128})

# %% [markdown]
# What is sent within a layer stays in a node. ZeRO-2 saves a rank the gradients of its stage, and sends them once for
# each micro-batch: that is why `--pp` refuses it.

# %% tags=["check"]
assert cube_of_eight.agrees
assert cube_of_eight.ranks == 8
pipeline = transfers(tk.Strategy(sharding="fsdp", pp=4, precision="bf16"), 16)
assert gradients_of(pipeline) < gradients_of(transfers(tk.Strategy(sharding="zero3", precision="bf16"), 4))

# %% [markdown]
# ## The rule
#
# **Where links are fast, take `fsdp` while a step has rows for every rank. Where they are slow, or rows are few: `--tp`
# within a node, `--pp` across, and copies with the ranks that are left.** Your number: how many times as fast a link is
# within a node as across, by card. Then let the forecast decide:

# %%
cards = {name: tk.hardware(name).device.card for name in SHOWN}
links = [(name, f"{card.peer:,}", f"{card.network:,}", within_over_across(name)) for name, card in cards.items()]
table("GB/s of a GPU, one way", ("card", "within a node", "across", "times as fast"), links)

# %% [markdown]
# 128 rows a step of 4,096 tokens, on one GPU, one node and four:

# %% tags=["helper"]
CANDIDATES = {
    "fsdp": {"sharding": "fsdp"}, "zero3": {"sharding": "zero3"}, "tp 8": {"tp": 8}, "pp 4": {"pp": 4},
    "tp 8 × pp 2": {"tp": 8, "pp": 2}, "tp 8 × pp 4": {"tp": 8, "pp": 4},
}  # fmt: skip


def tried(spec, name, fields, card, ranks):
    """The forecast of a candidate, with as many micro-batches as 128 rows a step make; None where it is refused."""
    copies = ranks // (fields.get("tp", 1) * fields.get("pp", 1))
    if copies < 1 or ROWS_A_STEP % copies:
        return None
    sharding = fields.get("sharding") or ("fsdp" if copies > 1 else "none")
    if ranks == 1:
        sharding = "none"
    config = tk.TrainConfig(micro_batch=1, accumulation=ROWS_A_STEP // copies, seq_len=4096)
    try:
        strategy = tk.Strategy(**{**fields, "sharding": sharding}, precision="bf16")
        return tk.forecast(spec, strategy, machine(ranks, card), config, ranks=ranks, advice=False)
    except tk.ToolkitError:
        return None


# %%
def what_to_use(card, model):
    rows = []
    for where, ranks in (("one GPU", 1), ("one node", 8), ("four nodes", 32)):
        needs = {name: tried(MODELS[model], name, fields, card, ranks) for name, fields in CANDIDATES.items()}
        fitting = {name: need for name, need in needs.items() if need is not None and need.fits}
        best = max(fitting, key=lambda name: fitting[name].tokens_per_second, default="nothing fits")
        speed = f"{fitting[best].tokens_per_second:,.0f}" if fitting else "–"
        rows.append((where, best, speed, ", ".join(fitting)))
    return table(f"{model} on {card}", ("where", "the fastest that fits", "tokens/s", "all that fit"), rows)


MODELS = {format_count(spec.elements): spec for spec in (LLAMA_1B, LLAMA_8B, MODEL_45)}
start = {"card": CARD, "model": format_count(LLAMA_8B.elements)}
tk.vary(what_to_use, card=SHOWN, model=list(MODELS), start=start, ahead=True)

# %% [markdown]
# ## When it goes wrong
#
# - **Ranks wait half of the time**: too few micro-batches. `--accumulation` is their number; take four times the stages.
# - **One stage is the fullest**: the first keeps the most micro-batches with 1F1B, the last one the head. `forecast` names it.
# - **`--tp` makes it slower**: it crosses nodes, or PCIe. Use `--pp` there.
# - **A rank died in a pipeline**: all end within `--timeout`, and the message names the stage.
# - **A combination is refused**: the sentence says so before anything starts.

# %%
refused = []
asked_for = ({"sharding": "zero3", "pp": 2}, {"pp": 2, "adapter": "qlora"}, {"pp": 2, "pp_stages_per_rank": 2})
for fields in asked_for:
    strategy = tk.Strategy(**fields)
    try:
        tk.forecast("embedded", strategy, machine(4), ranks=strategy.least_ranks, advice=False)
    except tk.StrategyError as error:
        words = (f"--{name.replace('_', '-')} {value}" for name, value in fields.items())
        refused.append((" ".join(words), str(error)))
table("Refused", ("asked", "the sentence"), refused)

# %% [markdown]
# Try others:


# %%
def accepted(sharding, pp, tp, accumulation):
    config, spec = tk.TrainConfig(accumulation=accumulation), tk.describe("embedded")
    job = job_of(tk.Strategy(sharding=sharding, pp=pp, tp=tp), 8, config, spec)  # a refusal is shown as its sentence
    return f"Accepted: {job.parallelism.dp_size} x {pp} stages x {tp} slices, {job.global_batch} rows a step."


DEGREES = {"pp": [1, 2, 4, 8], "tp": [1, 2, 4, 8], "accumulation": [1, 2, 4, 8]}
STARTS = {"sharding": "zero2", "pp": 2, "tp": 2, "accumulation": 4}
tk.vary(accepted, sharding=["none", "ddp", "zero2", "fsdp"], **DEGREES, start=STARTS)

# %% tags=["check"]
assert len(refused) == 3

# %% [markdown]
# ## Exercises
#
# 1. How many micro-batches make eight ranks of a 1F1B pipeline wait at most 10% of a step? Guess from the formula,
#    then play the schedule.
# 2. A layer of a Llama of 8B on `--tp 8`, 4,096 tokens: how many bytes does a rank send in its four all-reduces, in
#    bf16? And a stage to the next?
# 3. How many cards of 6 GB hold the model of 24 GB? And how many of 8 GB?

# %% tags=["solution"]
fewest = next(m for m in range(8, 200) if play(8, m, "1f1b").idle_share <= 0.1)
print(f"{fewest}: 7 / (m + 7) is at most a tenth from 63 on.")

# %% tags=["solution"]
state = 4096 * LLAMA_8B.hidden * 2
print(f"{format_bytes(4 * 2 * 7 / 8 * state)} within a layer; {format_bytes(state)} between two stages, and back.")

# %% tags=["solution"]
rows = [(f"{gb} GB", len(filled(slots_of(MODEL_24), gb * 10**9 - CUDA))) for gb in (6, 8)]
table("Cards that hold 24 GB", ("each", "cards"), rows)

# %% [markdown]
# ## Next
#
# You have seen all eight. Take a model of yours: `toolkit plan MODEL --hardware "8x A100-80GB"`, then
# `toolkit train --pp 2`.
