# %% [markdown]
# # Which sharding fits my model, and what does it cost?
#
# Your model does not fit on one GPU, or it fits and leaves no room for a batch. Several GPUs can *share* what training
# needs. Here you train one model under five shardings, read from each what a rank holds and sends, and hold two
# published recipes against their forecast. Each number says whether it was **measured** or **forecast**.

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
# **You know**: parameters, gradients and optimizer states ([02](02_where_the_memory_goes.ipynb)), activations
# ([04](04_activations.ipynb)) and master weights ([05](05_precision.ipynb)).
#
# **You can then**: choose a sharding and an offload for a machine, say what they send, and find a training that is
# not sharded as you asked.
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
GPU = tk.hardware().device.kind == "cuda" and tk.hardware().count > 1  # sharding takes two ranks, and each its own GPU
SHARDINGS = "ddp,zero2,zero3,fsdp,fsdp_grad_op"  # trained for real
STEPS = 50 if GPU else 3  # of each of these runs; on a processor memory is measured in the first three
ACCUMULATION = 4  # micro-batches of a step in the loop by hand
WORDS = "zero3,fsdp"  # what the same loop is run under
PUBLISHED = "TITAN-RTX"  # the card of the published recipes

# %% tags=["helper"]
import dataclasses
import itertools
import json
import math
import os
from html import escape
from pathlib import Path

import torch
import transformers
import yaml
from IPython.display import HTML

from toolkit.comparison import Comparison, read_run
from toolkit.core.atomic_io import read_events
from toolkit.core.charts import Bar, bars, figure
from toolkit.core.display import Table
from toolkit.core.errors import StrategyError
from toolkit.core.pictures import picture
from toolkit.core.units import format_bytes, format_count

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
if not GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a single GPU cannot be shared by two ranks: they run on the processor
RANKS = tk.hardware().count if GPU else 2
MACHINE = tk.hardware(None if GPU else f"{RANKS}x cpu")
LEFT = Path("runs/06").resolve()
LEFT.mkdir(parents=True, exist_ok=True)


def needs(*runs, one_document=True):
    """What a rank of the largest of these runs needs, forecast with the run's own settings for three machines.

    A row of so few steps is a piece of one document.
    """
    rows = []
    for machine in (f"{RANKS}x cpu", f"{RANKS}x T4", f"{RANKS}x L4"):
        try:
            options = {
                "ranks": RANKS,
                "save": False,
                "num_checkpoints": 0,
                "one_document": one_document,
                "advice": False,
            }
            forecasts = [tk.forecast(spec, strategy, machine, step, **options) for spec, strategy, step in runs]
        except tk.StrategyError as refusal:
            rows.append((machine, "–", "–", str(refusal)))
            continue
        most = max(forecasts, key=lambda forecast: forecast.needed_bytes)
        fits = "yes" if most.fits else "no"
        rows.append((machine, most.strategy.precision, format_bytes(most.needed_bytes), fits))
    columns = ("machine", "precision", "a rank needs", "fits")
    return Table(title="What this notebook's runs need", columns=columns, rows=rows)


def table(title, columns, rows):
    """A table that shows itself."""
    return Table(title=title, columns=columns, rows=rows)


def show(chart, title, columns, rows):
    """A picture and its table."""
    return HTML(figure(chart, table(title, columns, rows)))


def evaluation_loss(run):
    """The last one of a run."""
    return next(
        event["eval_loss"] for event in reversed(read_events(run.folder / "events.jsonl")) if "eval_loss" in event
    )


# %% [markdown]
# The runs of this notebook are equal but for one word. The one that needs most, forecast for this processor and for
# two cards:

# %%
PLAIN = tk.Strategy(loss="whole", activation_checkpointing="none")
STRATEGIES = {word: dataclasses.replace(PLAIN, sharding=word) for word in SHARDINGS.split(",")}
needed = needs(*(("embedded", strategy, tk.TrainConfig()) for strategy in STRATEGIES.values()))
needed

# %% [markdown]
# **Your guess**, before you run on. Two ranks train one model in fp32. Which rank is fullest at its peak: one of DDP,
# ZeRO-2, ZeRO-3 or FSDP? And which sends the most bytes in a step?
#
# ## One word, five trainings
#
# `tk.launch` starts processes of their own. Only one word differs between these runs. The model is a Llama of 5M
# parameters, the text Python's own sources, the precision the default: fp32 on a processor, bf16 on a GPU that has
# it. Each run also evaluates, with a micro-batch of its own: nothing is kept for a backward there.

# %%
(LEFT / "held_out.txt").write_text("\n".join(Path(os.__file__).read_text(encoding="utf-8").splitlines()[:300]))
fields = {
    "steps": STEPS,
    "save": False,
    "save_seconds": 0,
    "eval_data": str(LEFT / "held_out.txt"),
    "eval_micro_batch": 8,
}
runs = {}
for word, strategy in STRATEGIES.items():
    runs[word] = tk.launch("toolkit.finetune", strategy, processes=RANKS, **fields).wait(progress=False)

# %% [markdown]
# First what each took: **measured** by the allocator, and behind the × the **forecast** from before the launch, as a
# multiple of the measurement. Below: did all learn the same? (On two cores of a processor the speeds say little.)

# %%
results = {word: read_run(run.folder) for word, run in runs.items()}
comparison = Comparison(model="embedded", data="embedded", results=tuple(results.values()))
comparison

# %% tags=["check"]
assert all(run.status == "finished" for run in runs.values())
most_needed = max(run.memory["forecast"]["device"]["needed_bytes"] for run in runs.values())
requests = [("embedded", strategy, tk.TrainConfig()) for strategy in STRATEGIES.values()]
# Whether a row holds several documents, which take a mask, the data and the steps decide.
either = {needs(*requests, one_document=each).rows[0][2] for each in (True, False)}
assert GPU or format_bytes(most_needed) in either
for result in results.values():
    assert abs(result.forecast["device"]["peak_bytes"] / result.measured["peak_bytes"] - 1) < (0.1 if GPU else 0.03)
    assert comparison.agrees(result)
elements = tk.describe("embedded").elements
HALF = comparison.results[0].strategy["precision"] in ("bf16", "fp16")
WIDTH = {word: 2 if HALF and word.startswith("zero") else 4 for word in runs}  # bytes of a parameter
SHARDED = ("zero3", "fsdp", "fsdp_grad_op")
for word, result in results.items():
    share = elements * WIDTH[word] / (RANKS if word in SHARDED else 1)
    assert all(abs(held - share) < 0.04 * elements for held in result.parameter_bytes_per_rank)
    optimizer = 8 * elements / (1 if word == "ddp" else RANKS)
    assert abs(result.measured["parts"].get("optimizer", optimizer) - optimizer) < 0.08 * elements

# %% [markdown]
# Sharding changes where a number lies, not what it is: the losses agree, but for the order of sums. What differs is
# what the fullest rank holds at its peak. *Transient* comes and goes within a step.

# %%
each = [Bar(label=word, parts=result.measured["parts"]) for word, result in results.items()]
HTML(bars(each, title=f"At the peak, the fullest of {RANKS} ranks (measured)"))

# %% [markdown]
# On two ranks, in fp32, ZeRO-3 can take more than ZeRO-2: DeepSpeed keeps a second copy of its shard as master, and
# gathers into buffers. FSDP's shard *is* the master. One pair is not equal, though tables often say so:
# `fsdp_grad_op` (FSDP1's `SHARD_GRAD_OP`) and ZeRO-2. ZeRO-2 holds all parameters at all times; grad-op holds its
# shard between steps.

# %% tags=["check"]
if {"zero2", "zero3", "fsdp"} <= set(runs) and RANKS == 2 and not HALF:
    peak = {word: results[word].measured["peak_bytes"] for word in ("zero2", "zero3", "fsdp")}
    assert peak["fsdp"] < peak["zero2"] < peak["zero3"]
if {"zero2", "fsdp_grad_op"} <= set(runs):
    pair = {word: max(results[word].parameter_bytes_per_rank) / WIDTH[word] for word in ("zero2", "fsdp_grad_op")}
    assert abs(pair["fsdp_grad_op"] / pair["zero2"] - 1 / RANKS) < 0.01
assert tk.Strategy(sharding="SHARD_GRAD_OP").sharding == "fsdp_grad_op"

# %% [markdown]
# The curves of all runs over each other: equal losses are one line. Move the axis.


# %%
def all_runs(axis):
    return tk.compare_runs(list(runs.values()), log=axis == "logarithmic")


tk.vary(all_runs, axis=["linear", "logarithmic"], start={"axis": "linear"}, title="One word apart")

# %% [markdown]
# Any two, as forecasts side by side, with the reason of every difference:

# %%
ZERO2, knobs = dataclasses.replace(PLAIN, sharding="zero2"), ["sharding", "against_sharding", "devices"]
tk.explore("compare", None, f"{RANKS}x cpu", ZERO2, tk.TrainConfig(), controls=knobs)


# %% tags=["helper"]
def settings_of(strategy):
    """What the engine gets of a strategy on eight GPUs."""
    settings = tk.resolve("embedded", strategy, "8x A100-80GB").settings
    return escape(yaml.safe_dump(json.loads(json.dumps(settings)), sort_keys=False))


# %% [markdown]
# What does the word set? These are DeepSpeed's own config, and what the toolkit gives FSDP2, on eight
# GPUs. Move the word, and see what `offload` adds. In a shell, `toolkit config --sharding zero3 --processes 8` prints
# the file for `accelerate launch`.


# %%
def engine_settings(sharding, offload, precision):
    return f"<pre>{settings_of(tk.Strategy(sharding=sharding, offload=offload, precision=precision))}</pre>"


WORDS_OF = {"sharding": ["ddp", "zero2", "zero3", "fsdp", "fsdp_grad_op"], "offload": ["none", "optimizer", "cpu"]}
start = {"sharding": "zero3", "offload": "cpu", "precision": "bf16"}
tk.vary(engine_settings, **WORDS_OF, precision=["fp32", "fp16", "bf16"], start=start)

# %% tags=["check"]
assert "stage: 3" in engine_settings("zero3", "cpu", "bf16")
assert "device: cpu" in engine_settings("zero3", "cpu", "bf16")
assert "reshard_after_forward: false" in engine_settings("fsdp_grad_op", "none", "bf16")

# %% [markdown]
# ## Who holds what, on your machine
#
# Two ranks are few. Take a Llama of 8B on eight A100: move the sharding, the offload and the number of devices, and
# watch which part shrinks. Find the first number of devices at which `fsdp` fits without offload.

# %% tags=["helper"]
from transformers import LlamaConfig

LLAMA_8B = tk.describe(
    LlamaConfig(hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
                num_key_value_heads=8, vocab_size=128_256, max_position_embeddings=8192)
)  # fmt: skip

# %%
BATCH = tk.TrainConfig(micro_batch=1, seq_len=4096)
tk.explore(
    "memory", LLAMA_8B, "8x A100-80GB", tk.Strategy(sharding="fsdp"), BATCH, controls=["sharding", "offload", "devices"]
)

# %% tags=["check"]
COUNTS, STATES = (2, 4, 8, 16), ("parameters", "master", "optimizer")


def states_of(word, ranks):
    parts = tk.forecast("embedded", tk.Strategy(sharding=word), f"{ranks}x cpu").parts
    return sum(parts.get(part, 0) for part in STATES)


states = {word: [states_of(word, ranks) for ranks in COUNTS] for word in dict.fromkeys(("ddp", *runs))}
assert states["ddp"][0] == states["ddp"][-1]  # DDP never shrinks
assert all(sizes[-1] < sizes[0] for word, sizes in states.items() if word != "ddp")

# %% [markdown]
# ## A step, moment by moment
#
# Four ranks, a model of four layers. Blue is a parameter that the rank keeps, pale one that it has gathered for now,
# red a gradient, green the optimizer's states. The lane below is the rank's part of the **host**. Choose a sharding,
# then go through the step: which layer is whole, and when are the gradients reduced? Bytes are for 1B parameters in
# bf16: 2 a parameter, 4 a gradient, 12 for master and moments.

# %% tags=["helper"]
from matplotlib.patches import Rectangle

BLUE, PALE, RED, GREEN, GREY, INK = "#1649ff", "#c5d2ff", "#a21600", "#33a36b", "#4b5563", "#1f2937"
LAYERS, PIECES, BILLION = 4, 4, 10**9
SHOWN = ["ddp", "zero1", "zero2", "zero3"]
MOMENTS = ["between steps", *(f"forward {n}" for n in range(1, 5)), *(f"backward {n}" for n in range(4, 0, -1)), "step"]


class Moment:
    """What each of four ranks holds and has sent at a moment of a step. Sizes are shares of a whole model's part."""

    def __init__(self, sharding, offload, at):
        tk.Strategy(sharding=sharding, offload=offload)  # refuses what no engine runs
        self.away, self.host_parameters = offload != "none", offload == "cpu"
        self.sharded_p, self.sharded_g, self.sharded_o = (
            sharding == "zero3",
            sharding in ("zero2", "zero3"),
            sharding != "ddp",
        )
        now = MOMENTS.index(at)
        self.gathered = (
            ({now - 1} if 1 <= now <= 4 else {8 - now} if 5 <= now <= 8 else set()) if self.sharded_p else set()
        )
        done = range(max(0, 9 - now), LAYERS) if now >= 5 else range(0)  # layers with finished gradients
        self.current = {8 - now} if 5 <= now <= 8 else set()
        self.gradients = dict.fromkeys(done, 1 / PIECES if self.sharded_g else 1.0) | dict.fromkeys(self.current, 1.0)
        self.stepped = at == "step"
        self.sent, self.bus = self._moved(min(now, 4), min(max(0, now - 4), 4))

    def _moved(self, forwards, backwards):
        """Bytes that a rank has sent to others, and over PCIe."""
        p, g, part = 2 * BILLION / LAYERS, 4 * BILLION / LAYERS, (PIECES - 1) / PIECES
        sent = part * (p * (forwards + backwards) if self.sharded_p else 0)
        sent += part * g * backwards * (1 if self.sharded_o else 2)  # a reduce-scatter, or an all-reduce of two halves
        sent += part * p * LAYERS if self.stepped and self.sharded_o and not self.sharded_p else 0
        bus = g / PIECES * backwards if self.away else 0
        bus += p / PIECES * (forwards + backwards) if self.host_parameters else 0
        bus += p * LAYERS / PIECES if self.away and self.stepped and not self.host_parameters else 0
        return sent, bus

    def device_bytes(self):
        own = 0 if self.host_parameters else 1 / PIECES if self.sharded_p else 1
        whole = len(self.gathered) / LAYERS * (1 - own)
        kept = {} if self.away and self.sharded_o else self.gradients
        gradients = sum({**kept, **dict.fromkeys(self.current, 1.0)}.values()) / LAYERS
        states = 0 if self.away else 1 / PIECES if self.sharded_o else 1
        return BILLION * (2 * (own + whole) + 4 * gradients + 12 * states)

    def host_bytes(self):
        if not self.away:
            return 0
        return (
            BILLION
            / PIECES
            * (12 + (2 if self.host_parameters else 0) + 4 * len(set(self.gradients) - self.current) / LAYERS)
        )


def strip(axes, x, y, width, parts):
    """A box from its coloured stretches: (from, to, colour)."""
    axes.add_artist(Rectangle((x, y - 9), width, 18, facecolor="#ffffff", edgecolor="#8b95a3", clip_on=False))
    for begin, end, colour in parts:
        place = (x + width * begin, y - 9)
        axes.add_artist(Rectangle(place, width * (end - begin), 18, facecolor=colour, clip_on=False))


def draw_moment(axes, moment):
    axes.set(xlim=(0, 760), ylim=(196, 0))
    text = {"va": "center", "size": 12, "color": GREY}
    for label, y in (("parameters", 34), ("gradients", 64), ("optimizer", 94), ("host", 140)):
        axes.text(92, y, label, ha="right", **text)
    axes.axhline(117, color="#8b95a3", lw=1, ls="--")
    for rank in range(PIECES):
        left, own = 104 + 166 * rank, (rank / PIECES, (rank + 1) / PIECES)
        axes.text(left + 72, 10, f"rank {rank}", ha="center", **text)
        for layer in range(LAYERS):
            x, parts = left + 37 * layer, []
            parts += [(0, 1, PALE)] if layer in moment.gathered else []
            kept = own if moment.sharded_p else (0, 1)
            parts += [] if moment.host_parameters else [(*kept, BLUE)]
            strip(axes, x, 34, 34, parts)
            if moment.host_parameters:
                strip(axes, x, 140, 34, [(*own, BLUE)])
            whole = layer in moment.current or not moment.sharded_g
            gone = moment.away and layer not in moment.current
            red = [(*((0, 1) if whole else own), RED)] if layer in moment.gradients else []
            strip(axes, x, 64, 34, [] if gone else red)
            if moment.away:
                strip(axes, x, 162, 34, red if gone else [])
        states = [(*(own if moment.sharded_o else (0, 1)), GREEN)]
        strip(axes, left, 94, 145, [] if moment.away else states)
        if moment.away:
            strip(axes, left, 184, 145, states)


# %%
def moment_of_a_step(sharding, offload, moment):
    here = Moment(sharding, offload, moment)
    sizes = [format_bytes(round(size)) for size in (here.device_bytes(), here.host_bytes(), here.sent, here.bus)]
    title = f"{sharding}, offload {offload}: {moment}"
    chart = picture(title, ", ".join(sizes), lambda axes: draw_moment(axes, here), {}, (0, 0), (0, 196, 4))
    return show(chart, "", ("a device holds", "its host holds", "sent so far, a rank", "over PCIe so far"), [sizes])


STARTS = {"sharding": "zero3", "offload": "cpu", "moment": "backward 3"}
tk.vary(moment_of_a_step, start=STARTS, sharding=SHOWN, offload=["none", "optimizer", "cpu"], moment=MOMENTS)

# %% tags=["check"]
SMALL = "4x L4"
for word in ("ddp", "zero1", "zero2", "zero3"):
    strategy = tk.Strategy(sharding=word, precision="bf16")
    # An account of the whole step: DDP gathers no bf16 copy, since its parameters are fp32.
    sent = Moment(word, "none", "step").sent
    assert abs(tk.forecast("embedded", strategy, SMALL).communication_bytes / (sent / BILLION * elements) - 1) < 1e-3
at_rest = {word: Moment(word, "none", "between steps").device_bytes() for word in ("ddp", "zero1", "zero2", "zero3")}
assert at_rest["ddp"] > at_rest["zero1"] == at_rest["zero2"] > at_rest["zero3"]
assert Moment("zero3", "cpu", "between steps").device_bytes() == 0

# %% [markdown]
# The toolkit's own account of a real step, with every allocation, is the timeline. `toolkit timeline` shows it for
# any model:

# %%
tk.explore("timeline", LLAMA_8B, "8x A100-80GB", tk.Strategy(sharding="zero3"), BATCH, controls=["sharding", "offload"])

# %% [markdown]
# ## What is sent
#
# Ranks talk in *collectives*. An **all-reduce** gives everybody the sum of all. In a ring it has two halves: a
# **reduce-scatter** (each ends with the sum of one part) and an **all-gather** (each collects all parts). Each half
# sends (N − 1)/N of the tensor. Move the ranks: it hardly grows.


# %% tags=["helper"]
def ring(tensors):
    """All-reduce in a ring. Every rank's result, and the elements that one rank sent in each half."""
    ranks, sent = len(tensors), []
    parts = [list(tensor.clone().chunk(ranks)) for tensor in tensors]
    for half in ("reduce-scatter", "all-gather"):
        count = 0
        for turn in range(ranks - 1):
            first = 0 if half == "reduce-scatter" else 1
            moving = [(rank, (rank + first - turn) % ranks) for rank in range(ranks)]
            packets = [parts[rank][part].clone() for rank, part in moving]
            for (rank, part), packet in zip(moving, packets, strict=True):
                right = (rank + 1) % ranks
                parts[right][part] = parts[right][part] + packet if half == "reduce-scatter" else packet
            count += packets[0].numel()
        sent.append(count)
    return [torch.cat(part) for part in parts], sent


HALVES = {
    "ddp": {"gradients": 2},
    "zero1": {"gradients": 1, "parameters": 1},
    "zero2": {"gradients": 1, "parameters": 1},
    "zero3": {"gradients": 1, "parameters": 2},
    "fsdp": {"gradients": 1, "parameters": 2},
    "fsdp_grad_op": {"gradients": 1, "parameters": 1},
}


# %%
def sent_in_a_step(ranks, model_in_billions):
    share = ring([torch.ones(1024)] * ranks)[1][0] / 1024  # of a half: counted
    sizes, rows = {"gradients": 4e9, "parameters": 2e9}, []
    for word, halves in HALVES.items():
        parts = {part: number * share * sizes[part] * model_in_billions for part, number in halves.items()}
        rows.append(Bar(label=word, parts=parts))
    return bars(rows, title=f"Sent by each of {ranks} ranks in a step, in bf16 (computed)")


tk.vary(sent_in_a_step, ranks=[2, 4, 8, 16, 32], model_in_billions=[1, 8, 70], ahead=True)

# %% tags=["check"]
for ranks in (2, 4, 8):
    tensors = [torch.randn(1024) for _ in range(ranks)]
    summed, sent = ring(tensors)
    assert all(torch.allclose(one, sum(tensors), atol=1e-5) for one in summed)
    assert sent == [1024 * (ranks - 1) // ranks] * 2
for word, run in runs.items():
    each = {"gradients": 4, "parameters": 2 if HALF else 4}
    volume = sum(n * each[part] * elements * (RANKS - 1) / RANKS for part, n in HALVES[word].items())
    assert run.memory["forecast"]["communication_bytes"] == round(volume)

# %% [markdown]
# DDP all-reduces gradients: 2 halves. ZeRO-2 reduce-scatters them, and all-gathers the stepped parameters: 2 halves.
# ZeRO-3 and FSDP gather parameters twice, for the forward and for the backward: 3 halves. Grad-op keeps them from
# forward to backward: 2. In bf16 a parameter has half the bytes of a gradient, so that ZeRO-3 and DDP send the same.
# The guess: on the two ranks above, in fp32, DDP is fullest, and ZeRO-3 and FSDP send most.
#
# ## DDP by hand, in six parts
#
# What do libraries do for you? This is a whole DDP training with gradient accumulation, without any of them: init,
# wrap, accumulate, synchronize at the last micro-batch alone, write on rank 0, destroy. A hook counts the
# all-reduces.

# %% tags=["helper"]
from contextlib import nullcontext

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit.data import embedded_files
from toolkit.data.embedded import embedded_model

FOLDER = str(embedded_model())
tokens = AutoTokenizer.from_pretrained(FOLDER)(embedded_files()[0].read_text(encoding="utf-8"), verbose=False)[
    "input_ids"
]
MADE = 2 * ACCUMULATION * RANKS  # rows: two steps
ROWS = torch.tensor((tokens * (1 + MADE * 64 // len(tokens)))[: MADE * 64]).view(-1, 64)


# %%
def count_and_reduce(calls, bucket):
    calls.append(bucket.buffer().nbytes)
    mean = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(mean, async_op=True).get_future().then(lambda reduced: reduced.value()[0])


# %% [markdown]
# Parts 3 and 4 are a step: `no_sync()` keeps DDP from an all-reduce after every micro-batch, of which only the last
# one counts.


# %%
def a_step(model, optimizer, rows, sync_last_only):
    for number, ids in enumerate(rows, start=1):  # 3. accumulate
        wait = sync_last_only and number < len(rows)
        with model.no_sync() if wait else nullcontext():  # 4. synchronize at the last one
            loss = model(input_ids=ids[None], labels=ids[None]).loss
            (loss / len(rows)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# %% [markdown]
# The other four parts stand around the steps.


# %%
def by_hand(sync_last_only, out):
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPU else torch.device("cpu")
    dist.init_process_group("nccl" if GPU else "gloo")  # 1. init
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).to(device)
    model = DistributedDataParallel(model)  # 2. wrap
    model.register_comm_hook(calls := [], count_and_reduce)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mine = ROWS[dist.get_rank() :: dist.get_world_size()].to(device)
    losses = [a_step(model, optimizer, rows, sync_last_only) for rows in mine.split(ACCUMULATION)]
    if dist.get_rank() == 0:  # 5. one rank writes
        Path(out).write_text(json.dumps({"losses": losses, "calls": calls}))
    dist.destroy_process_group()  # 6. destroy


# %% [markdown]
# Run it with the rule and without:

# %%
told = {}
for name, rule in (("at the last micro-batch", True), ("at every micro-batch", False)):
    out = LEFT / f"by_hand_{rule}.json"
    tk.launch(by_hand, tk.Strategy(sharding="ddp"), processes=RANKS, args=(rule, str(out))).wait(progress=False)
    told[name] = json.loads(out.read_text())
rows = [
    (name, len(each["calls"]), format_bytes(sum(each["calls"])), f"{each['losses'][-1]:.6f}")
    for name, each in told.items()
]
table("Two steps (counted)", ("gradients are reduced", "all-reduces", "bytes reduced", "last loss of rank 0"), rows)

# %% tags=["check"]
once, always = told.values()
assert len(always["calls"]) > len(once["calls"])
assert sum(always["calls"]) == ACCUMULATION * sum(once["calls"])
assert sum(once["calls"]) == 2 * 4 * elements  # two steps, four bytes a gradient
assert max(abs(a - b) for a, b in zip(once["losses"], always["losses"], strict=True)) < 1e-4

# %% [markdown]
# The same training, and the bytes are divided by the number of micro-batches. (DDP makes its buckets of 25 MiB from
# the order of the first backward: the first pass has one all-reduce, later ones have a few.) What does the rule save
# in a step of a larger model?


# %%
def reduced_in_a_step(accumulation, model_in_billions):
    once = {"gradients": 4e9 * model_in_billions}
    every = {"gradients": accumulation * once["gradients"]}
    rows = [Bar(label="at the last micro-batch", parts=once), Bar(label="at every one", parts=every)]
    return bars(rows, title=f"All-reduced in a step of {accumulation} micro-batches (computed)")


tk.vary(reduced_in_a_step, accumulation=[1, 2, 4, 8, 16, 32], model_in_billions=[1, 8, 70])

# %% [markdown]
# Now the same loop with the toolkit's
# `Accelerator`. First the inner part, for one micro-batch:


# %%
def accelerated_step(accelerator, model, optimizer, ids):
    with accelerator.accumulate(model):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


# %% [markdown]
# And what stands around it. Nothing here says how it is sharded: that is the launch's word.


# %%
def with_accelerate(out):
    train_config = tk.TrainConfig(micro_batch=1, accumulation=ACCUMULATION, max_grad_norm=0)
    accelerator = tk.accelerator(train_config=train_config, spec=tk.describe(FOLDER))
    model, _ = tk.load(accelerator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(ROWS, batch_size=1)
    model, optimizer, loader = tk.prepare(accelerator, model, optimizer, loader)
    losses = [accelerated_step(accelerator, model, optimizer, ids) for ids in loader][ACCUMULATION - 1 :: ACCUMULATION]
    if accelerator.is_main_process:
        Path(out).write_text(json.dumps(losses))
    accelerator.end_training()


# %% [markdown]
# Under ZeRO-3 with everything on the host, and under FSDP:

# %%
rows = [("by hand, ddp", f"{once['losses'][-1]:.6f}", "–")]
apart = {}
for word in WORDS.split(","):
    strategy = tk.Strategy(sharding=word, offload="cpu" if word == "zero3" else "none", precision="fp32")
    out = LEFT / f"{word}.json"
    tk.launch(with_accelerate, strategy, processes=RANKS, args=(str(out),)).wait(progress=False)
    losses = json.loads(out.read_text())
    apart[word] = max(abs(a - b) / b for a, b in zip(losses, once["losses"], strict=True))
    rows.append((f"tk.accelerator, {word}, offload {strategy.offload}", f"{losses[-1]:.6f}", f"{apart[word]:.0e}"))
table("The same rows, the same losses", ("training", "last loss of rank 0", "largest relative difference"), rows)

# %% tags=["check"]
assert max(apart.values()) < 1e-4

# %% [markdown]
# On CPU ranks the host *is* the device, so that this offload moved nothing. It was the same code, and the same
# numbers.
#
# ## Not what you asked for: StrategyMismatch
#
# An old habit: wrap the model in DDP, then train it under `fsdp`. It runs, every rank holds everything, and nobody
# says so. `tk.audit` compares what was prepared with what was asked for.


# %%
def an_old_habit(repaired, out):
    accelerator = tk.accelerator(train_config=tk.TrainConfig(max_grad_norm=0), spec=tk.describe(FOLDER))
    model, _ = tk.load(accelerator)
    model = model if repaired else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        if repaired:
            model, optimizer = tk.prepare(accelerator, model, optimizer)
        tk.audit(model, optimizer)
        said = f"as asked: {type(model).__name__}"
    except tk.StrategyMismatch as error:
        said = f"StrategyMismatch: {error}"
    if accelerator.is_main_process:
        Path(out).write_text(said)


# %% [markdown]
# Met, and repaired: `tk.prepare` wraps the model, and audits it.

# %%
heard = {}
for repaired in (False, True):
    out = LEFT / "habit.txt"
    tk.launch(an_old_habit, tk.Strategy(sharding="fsdp"), processes=RANKS, args=(repaired, str(out))).wait(
        progress=False
    )
    heard["tk.prepare(model)" if repaired else "DistributedDataParallel(model)"] = out.read_text()
table("Launched with sharding fsdp", ("the script calls", "the audit"), list(heard.items()))

# %% [markdown]
# What would the habit cost? For the Llama of 8B, by forecast:


# %%
def the_habit_costs(ranks):
    needs = {
        word: tk.forecast(LLAMA_8B, tk.Strategy(sharding=word), f"{ranks}x A100-80GB", BATCH, advice=False)
        for word in ("fsdp", "ddp")
    }
    rows = [
        Bar(label=label, parts=need.parts)
        for label, need in zip(("asked: fsdp", "got: ddp"), needs.values(), strict=True)
    ]
    limit = needs["ddp"].limit_bytes
    return bars(rows, title=f"The peak of each of {ranks} ranks", limit=limit, limit_label="a GPU has")


tk.vary(the_habit_costs, ranks=[2, 4, 8])

# %% tags=["check"]
wrong, right = heard.values()
assert wrong.startswith("StrategyMismatch")
assert "DistributedDataParallel" in wrong
assert right.startswith("as asked")

# %% [markdown]
# ## Two published recipes, beside their forecast
#
# «Accelerate Large Model Training using DeepSpeed» (Hugging Face, 2022) trains in fp16 on TITAN RTX cards, without
# activation checkpointing. **BlenderBot-400M** on two cards, 10,000 pairs of at most 128 and 64 tokens: DDP has room
# for 100 rows a GPU, ZeRO-2 for 200. **GPT-XL** on one card, blocks of 128 tokens: nothing fits without sharding, and
# ZeRO-3 with everything offloaded takes 16 rows.

# %% tags=["helper"]
from transformers import BlenderbotConfig, GPT2Config

BLENDERBOT = BlenderbotConfig(
    vocab_size=8008, max_position_embeddings=128, d_model=1280,
    encoder_layers=2, encoder_ffn_dim=5120, encoder_attention_heads=32,
    decoder_layers=12, decoder_ffn_dim=5120, decoder_attention_heads=32,
)  # fmt: skip
GPT_XL = GPT2Config(n_layer=48, n_embd=1600, n_head=25, n_positions=1024)
BARE = tk.Strategy(loss="whole", sharding="none", precision="fp16", activation_checkpointing="none", attention="eager")
DDP = dataclasses.replace(BARE, sharding="ddp")
ZERO_2 = dataclasses.replace(
    BARE, sharding="zero2", overlap_comm="on", bucket_elements=200_000_000, gather_bucket_elements=200_000_000
)
ZERO_3 = dataclasses.replace(BARE, sharding="zero3", offload="cpu", overlap_comm="on")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A training of huggingface.co/blog/accelerate-deepspeed, as benchmarks/published.py forecasts it."""

    config: object
    cards: int
    strategy: tk.Strategy
    seq_len: int  # BlenderBot: 73 on each side are as many tokens times layers as 128 in 2 layers and 64 in 12
    rows: int  # of an epoch
    micro_batch: int  # published; 0: not even 1
    epoch: float | None  # seconds, published

    @property
    def machine(self):
        return tk.hardware(f"{self.cards}x {PUBLISHED}", host_memory="60GB")

    def forecast(self, rows):
        step = tk.TrainConfig(micro_batch=rows, seq_len=self.seq_len)
        options = {"one_document": True, "num_checkpoints": 0, "advice": False}
        return tk.forecast(tk.describe(self.config), self.strategy, self.machine, step, **options)

    def largest(self):
        """The largest micro-batch that fits. Needs grow by a row's bytes: try near where that leads."""
        if not self.forecast(1).fits:
            return 0
        few, many = (self.forecast(rows) for rows in (self.micro_batch // 2, self.micro_batch))
        a_row = (many.needed_bytes - few.needed_bytes) / (self.micro_batch - self.micro_batch // 2)
        guess = self.micro_batch + int((many.limit_bytes - many.needed_bytes) / a_row)
        while not self.forecast(guess).fits:
            guess -= 1
        while self.forecast(guess + 1).fits:
            guess += 1
        return guess

    def epoch_forecast(self):
        steps = math.ceil(self.rows / (self.micro_batch * self.cards))
        return steps * self.forecast(self.micro_batch).step_seconds


RECIPES = {
    "BlenderBot-400M, ddp": Recipe(BLENDERBOT, 2, DDP, 73, 10_000, 100, 27.36),
    "BlenderBot-400M, zero2": Recipe(BLENDERBOT, 2, ZERO_2, 73, 10_000, 200, 19.06),
    "GPT-XL, none": Recipe(GPT_XL, 1, BARE, 128, 18_686, 0, None),
    "GPT-XL, zero3, offload cpu": Recipe(GPT_XL, 1, ZERO_3, 128, 18_686, 16, 6608.35),
}


def beside(published, forecast, spell):
    """Both figures, and how far the forecast is off."""
    if not published:
        return ("not even 1", "not even 1", "–") if forecast == 0 else ("–", "–", "–")
    return spell(published), spell(forecast), f"{forecast / published - 1:+.0%}"


LARGEST = {name: recipe.largest() for name, recipe in RECIPES.items()}
SECONDS = {name: recipe.epoch_forecast() if recipe.epoch else None for name, recipe in RECIPES.items()}

# %%
rows = []
for name, recipe in RECIPES.items():
    batch = beside(recipe.micro_batch, LARGEST[name], "{:,}".format)
    rows.append((name, recipe.cards, *batch, *beside(recipe.epoch, SECONDS[name], "{:,.1f} s".format)))
columns = ("recipe", "cards", "rows, published", "forecast", "off", "an epoch, published", "forecast", "off")
published = table(f"The largest micro-batch, and an epoch at the published one, on {PUBLISHED}", columns, rows)
published

# %% [markdown]
# What differs, and why? The forecast has room for a third to three quarters more rows: published batches are round
# numbers, and the next of them (200 for 100, 300 for 200, 32 for 16) does not fit by forecast either. Its epochs are
# shorter: it knows the card, and neither the loader, nor padding to the longest pair, nor the software of 2022. What
# sharding changes is alike in both: nearly twice the rows, and a shorter epoch. Move the rows:


# %%
def need_of(recipe, rows):
    need = RECIPES[recipe].forecast(rows)
    title = f"{recipe}, {rows} rows: {'fits' if need.fits else 'does not fit'}"
    rest = {"CUDA and fragmentation": need.needed_bytes - need.peak_bytes}
    bar = Bar(label=f"{rows} rows", parts={**need.parts, **rest})
    return bars([bar], title=title, limit=need.limit_bytes, limit_label="a GPU has")


BATCHES = [1, 16, 32, 100, 200, 300]
tk.vary(need_of, recipe=list(RECIPES), rows=BATCHES, start={"recipe": "BlenderBot-400M, zero2", "rows": 200})

# %% [markdown]
# (A card's «24 GB» are GiB, 2³⁰ bytes. The host's 60 GB are of 10⁹ bytes: 56 GiB.)

# %% tags=["check"]
ddp, zero2, bare, offloaded = LARGEST.values()
for name, recipe in RECIPES.items():
    if recipe.micro_batch:  # the published one fits; the next round one, of which the text speaks, does not
        assert recipe.forecast(recipe.micro_batch).fits
        assert 1.3 * recipe.micro_batch < LARGEST[name] < 1.8 * recipe.micro_batch
        assert PUBLISHED != "TITAN-RTX" or SECONDS[name] < recipe.epoch
assert not RECIPES["BlenderBot-400M, ddp"].forecast(200).fits
assert not RECIPES["BlenderBot-400M, zero2"].forecast(300).fits
assert bare == 0
assert 1.6 * ddp < zero2 < 2 * ddp  # the text: nearly twice the rows
assert SECONDS["BlenderBot-400M, zero2"] < SECONDS["BlenderBot-400M, ddp"]

# %% tags=["helper"]
# Where the batch generates, a rank holds weights, masters, moments and buffers, but no gradients.
STATES = ("parameters", "master", "optimizer", "buffers")
GENERATED = {"BlenderBot-400M, ddp": (50, "48.41 s"), "BlenderBot-400M, zero2": (100, "39.27 s")}  # published


def cache_of_a_row(recipe, beams, source, target):
    """Bytes of a row's cache: a key and a value of each decoder layer, for each beam.

    Under DDP Accelerate makes fp32 of all that a forward in fp16 returns, the cache of 2022 included. A DeepSpeed model is
    fp16. Beam search then held two copies of the targets' part: the reordered one, before the old one was free.
    """
    width = 4 if RECIPES[recipe].strategy.sharding == "ddp" else 2
    each = 2 * BLENDERBOT.decoder_layers * BLENDERBOT.d_model * width
    return beams * each * source, beams * each * target * 2


def room_for_cache(recipe):
    """Bytes of a card that are left beside the states, and what CUDA and communication take."""
    need = RECIPES[recipe].forecast(RECIPES[recipe].micro_batch)
    return need.limit_bytes - sum(need.parts.get(part, 0) for part in STATES) - sum(need.context.values())


# %% [markdown]
# ## Evaluation has its own micro-batch
#
# BlenderBot's recipe evaluates by *generating*, with 10 beams, a prefix of 128 tokens and a target of 64. Nothing is kept
# for a backward. What fills the card is the **cache**: a key and a value for each layer, row, beam and token. Move the
# lengths and the beams, and see how many rows fit beside the model:


# %%
def generation(beams, source, target):
    rows = []
    for recipe, (published, seconds) in GENERATED.items():
        room, cache = room_for_cache(recipe), cache_of_a_row(recipe, beams, source, target)
        rows.append((recipe, format_bytes(room), format_bytes(sum(cache)), int(room / sum(cache)), published, seconds))
    columns = ("recipe", "room", "cache of a row", "rows that fit", "rows, published", "seconds, published")
    return table(f"{beams} beams, {source} tokens of prefix, {target} of target", columns, rows)


RANGES = {"beams": [1, 2, 4, 10], "source": [32, 64, 128], "target": [16, 32, 64, 128]}
generated = generation(beams=10, source=128, target=64)
tk.vary(generation, start={"beams": 10, "source": 128, "target": 64}, **RANGES)

# %% [markdown]
# The published figures are of 10 beams, 128 and 64 tokens. **The seconds of a generation are not forecast**: the toolkit
# forecasts training. The rows that fit are computed from the cache alone. They say why ZeRO-2 has room for twice as many:
# its cache is in fp16 (under DDP Accelerate makes fp32 of it), and its moments are shared.

# %% tags=["check"]
from transformers import BlenderbotForConditionalGeneration

tiny = BlenderbotConfig(d_model=64, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
                        encoder_attention_heads=4, decoder_attention_heads=4, vocab_size=128, max_position_embeddings=64,
                        eos_token_id=None, forced_eos_token_id=None)  # fmt: skip
source = torch.randint(5, 100, (3, 20))
made = BlenderbotForConditionalGeneration(tiny).generate(
    source, num_beams=4, max_new_tokens=16, min_new_tokens=16, return_dict_in_generate=True
)
kept = sum(
    tensor.nbytes
    for cache in (made.past_key_values.self_attention_cache, made.past_key_values.cross_attention_cache)
    for layer in cache.layers
    for tensor in (layer.keys, layer.values)
)
assert kept == 3 * 4 * (20 + 16) * 2 * 2 * 64 * 4  # rows, beams, tokens, key and value, layers, width, fp32
for recipe, fits in ((row[0], row[3]) for row in generated.rows):
    assert (
        GENERATED[recipe][0] <= fits < 1.5 * GENERATED[recipe][0]
    )  # the published rows fit; half as many again do not

# %% [markdown]
# In a run of the toolkit: `--eval-data FILE --eval-micro-batch 8`. The loss does not depend on it:

# %%
rows = [(word, f"{evaluation_loss(run):.4f}") for word, run in runs.items()]
table("Loss on held-out text, 8 rows at once (measured)", ("sharding", "evaluation loss"), rows)

# %% [markdown]
# ## When sharding is not enough
#
# Ranks can also share the *layers* (a pipeline) or the *matrices* of a layer (tensor parallelism, `--tp 2`). A
# pipeline's devices wait for each other: S − 1 of M + S − 1 turns are lost, with S stages and M micro-batches (Huang
# et al. 2019). Move both.


# %% tags=["helper"]
def schedule(stages, micro):
    """(stage, time) → micro-batch and direction: all forwards, then all backwards, as GPipe does."""
    work, turn = {}, stages + micro - 1
    for stage in range(stages):
        for one in range(micro):
            work[stage, stage + one] = (one, "forward")
            work[stage, turn + (stages - 1 - stage) + (micro - 1 - one)] = (one, "backward")
    return work


def idle(stages, micro):
    work = schedule(stages, micro)
    return 1 - len(work) / (stages * (1 + max(time for _, time in work)))


# %%
def pipeline(stages, micro_batches):
    work, share = schedule(stages, micro_batches), f"{idle(stages, micro_batches):.0%}"
    end, colours = 1 + max(time for _, time in work), {"forward": BLUE, "backward": RED}

    def draw(axes):
        axes.set(xlim=(0, end), ylim=(stages, 0))
        for stage, direction in itertools.product(range(stages), colours):
            times = [time for (row, time), (_, what) in work.items() if (row, what) == (stage, direction)]
            axes.broken_barh([(time, 0.9) for time in times], (stage + 0.1, 0.8), color=colours[direction])

    legend = {name: {"color": colour, "lw": 8} for name, colour in colours.items()}
    return picture(f"{stages} stages: white is waiting, {share}", share, draw, legend, (12, 12), (6, 26 * stages, 8))


tk.vary(pipeline, start={"stages": 4, "micro_batches": 4}, stages=[2, 4, 8], micro_batches=[1, 2, 4, 8, 16, 32])

# %% tags=["check"]
for stages, micro in ((4, 1), (4, 4), (8, 16)):
    assert abs(idle(stages, micro) - (stages - 1) / (micro + stages - 1)) < 1e-12
# Tensor parallelism: the first matrix is cut by columns, the second by rows; the sum of the slices is the whole result.
x, up, down = torch.randn(8, 64), torch.randn(64, 256) / 8, torch.randn(256, 64) / 16
slices = [torch.nn.functional.gelu(x @ a) @ b for a, b in zip(up.chunk(4, dim=1), down.chunk(4, dim=0), strict=True)]
assert torch.allclose(sum(slices), torch.nn.functional.gelu(x @ up) @ down, atol=1e-5)

# %% [markdown]
# ## The rule
#
# **Take `fsdp`. Where less than 5% of the card would be left, take `fsdp` with offload `cpu`.** FSDP sends more than DDP,
# but it gathers the next layer while this one computes, and each rank steps its own share alone. So on these cards it is
# by forecast the fastest of those below without offload, and needs least. `zero3` is the same where you have DeepSpeed.
# Your number: FSDP needs 16/N bytes a parameter on N ranks, gradients included, and the layer that is gathered. Move the
# cards; each step has 64 rows in all. (What needs less than the card and does not fit is too large for the host.)


# %%
def in_order(card, count):
    rows, step = [], tk.TrainConfig(micro_batch=1, accumulation=64 // count, seq_len=4096)
    for word, offload in (("ddp", "none"), ("zero2", "none"), ("fsdp", "none"), ("fsdp", "cpu"), ("zero3", "cpu")):
        strategy = tk.Strategy(sharding=word, offload=offload)
        need = tk.forecast(LLAMA_8B, strategy, f"{count}x {card}", step, advice=False)
        fits = "yes" if need.leaves(0.05) else "hardly" if need.fits else "no"
        speed = f"{need.tokens_per_second:,.0f}"
        rows.append((word, offload, f"{need.needed_bytes / need.limit_bytes:.0%}", fits, speed))
    columns = ("sharding", "offload", "of the card", "fits", "tokens/s")
    return table(f"Llama 8B on {count} {card}, by forecast", columns, rows)


CARDS = ["L4", "RTX-4090", "A100-40GB", "A100-80GB", "H200-141GB"]
tk.vary(in_order, card=CARDS, count=[2, 4, 8], start={"card": "A100-40GB", "count": 8}, ahead=True)

# %% [markdown]
# `tk.plan` tries all of them, with micro-batches and recomputation, and keeps 5% to spare, too. Its first is the rule's:

# %%
machines = ["8x L4", "8x RTX-4090", "8x A100-40GB", "8x H200-141GB"]
plans = {machine: tk.plan(LLAMA_8B, machine, seq_len=4096, global_batch=64) for machine in machines}
tk.vary(lambda machine: plans[machine], machine=machines, start={"machine": "8x A100-40GB"}, title="The plan")

# %% tags=["check"]
for machine, plan in plans.items():
    rows = {row[:2]: row for row in in_order(machine.partition("x ")[2], 8).rows}
    offload = "none" if rows["fsdp", "none"][3] == "yes" else "cpu"
    assert (plan.best.strategy.sharding, plan.best.strategy.offload) == ("fsdp", offload)
for card, count in itertools.product(CARDS, (2, 4, 8)):
    speeds = {row[:2]: float(row[4].replace(",", "")) for row in in_order(card, count).rows}
    assert speeds["fsdp", "none"] >= max(speeds["ddp", "none"], speeds["zero2", "none"])
    shares = {row[:2]: float(row[2].rstrip("%")) for row in in_order(card, count).rows}
    assert shares["fsdp", "none"] <= min(shares["ddp", "none"], shares["zero2", "none"])

# %% [markdown]
# ## When it goes wrong
#
# - **Out of memory under ZeRO-3 on two GPUs**: there is little to share yet, and the gather buffers are new. Try `fsdp`.
# - **Offload, and each step takes seconds**: parameters and gradients cross PCIe. Count the bytes in the moments above.
# - **The memory is DDP's, though you asked for `fsdp`**: `tk.audit(model, optimizer)` names it.
# - **A value is refused**: the sentence says so before anything starts.

# %%
refused = []
for fields in ({"sharding": "zero2", "offload": "cpu"}, {"sharding": "fsdp", "precision": "fp8"}, {"sharding": "hsdp"}):
    try:
        tk.Strategy(**fields)
    except tk.StrategyError as error:
        refused.append((" ".join(f"--{name} {value}" for name, value in fields.items()), str(error)))
table("Refused", ("asked", "the sentence"), refused)

# %% [markdown]
# Try others:


# %%
def accepted(sharding, offload, precision):
    tk.Strategy(sharding=sharding, offload=offload, precision=precision)  # a refusal is shown as its sentence
    return "Accepted."


WORDS_OF = {"sharding": ["ddp", "zero2", "zero3", "fsdp", "hsdp"], "offload": ["none", "optimizer", "cpu"]}
tk.vary(
    accepted, **WORDS_OF, precision=["fp32", "bf16", "bf16_pure", "fp8"], start={"sharding": "zero2", "offload": "cpu"}
)

# %% tags=["check"]
assert len(refused) == 3
assert issubclass(tk.StrategyError, StrategyError)

# %% [markdown]
# ## Exercises
#
# 1. On how many A100 of 80 GB does the Llama of 8B fit under `fsdp` without offload, at 4,096 tokens? Guess from 16
#    bytes a parameter, then ask the forecast.
# 2. In the ring, how many turns does an all-reduce take on N ranks, and how much does a rank send? Which of the two
#    decides for a small tensor?
# 3. Set `ACCUMULATION` to 8 in the loop by hand. How many all-reduces are counted with the rule, and without?

# %% tags=["solution"]
for count in (1, 2, 4, 8):
    need = tk.forecast(LLAMA_8B, tk.Strategy(sharding="fsdp" if count > 1 else "none"), f"{count}x A100-80GB", BATCH)
    if need.fits:
        break
print(f"{count}: 16 bytes of each of {format_count(LLAMA_8B.elements)} parameters over {count} GPUs, and activations.")

# %% tags=["solution"]
rows = [(ranks, 2 * (ranks - 1), sum(ring([torch.ones(1024)] * ranks)[1])) for ranks in (2, 4, 8, 16)]
title = "Turns grow with N, bytes hardly: turns decide for small tensors"
table(title, ("ranks", "turns", "elements of 1,024 sent by a rank"), rows)

# %% tags=["solution"]
later = len(once["calls"]) - 1  # of a pass after the first, which has one
print(f"{len(once['calls'])} with the rule, whatever the accumulation; {1 + later * (2 * 8 - 1)} without.")

# %% [markdown]
# ## Next
#
# [07_lora_and_qlora](07_lora_and_qlora.ipynb): train a few percent of the weights, over a base of four bits.
