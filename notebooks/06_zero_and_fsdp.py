# %% [markdown]
# # ZeRO and FSDP: who holds what
#
# Several processes train one model. They can share the *data*, the *layers*, the *matrices* of a layer, or the
# *states* that training needs. This notebook draws these ways, trains the same model under six of them with real
# processes, and looks at what each rank holds, what it sends, and whether all learn the same. Then two worked
# examples: a larger batch in the same memory, and a model that only fits with offload. What is **forecast** and what
# was **measured** is said each time.

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
GPU = tk.hardware().device.kind == "cuda" and tk.hardware().count > 1  # sharding takes two ranks, and each its own GPU
SHARDINGS = "ddp,zero1,zero2,zero3,fsdp,fsdp_grad_op"  # trained for real
STEPS = 50 if GPU else 8  # of each of these runs
SCRIPTS = "ddp,zero3"  # what the rewritten loop is run under
T5_RUNS = "ddp,zero2"  # what the first worked example is run under
T5_LIMIT = 200  # MiB that a rank may take in it
NAMED = "8x V100-16GB"  # the machine of the second worked example: as AWS p3.16xlarge

# %%
import os
import statistics

import torch
import transformers
from IPython.display import HTML

from toolkit.comparison import Comparison, read_run
from toolkit.core.atomic_io import read_events
from toolkit.core.charts import Bar, bars, curve, figure
from toolkit.core.display import Table
from toolkit.core.pictures import picture
from toolkit.core.units import format_bytes, format_count, format_seconds, format_step_seconds

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
if not GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a single GPU cannot be shared by two ranks: they run on the processor
RANKS = tk.hardware().count if GPU else 2
MACHINE = tk.hardware(None if GPU else f"{RANKS}x cpu")


def table(title, columns, rows):
    return HTML(Table(title=title, columns=columns, rows=rows).html())


def show(chart, title, columns, rows):
    """A picture and its table."""
    return HTML(figure(chart, Table(title=title, columns=columns, rows=rows)))


def spread(found, expected):
    """The largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


# %% [markdown]
# ## What can be shared
#
# Four devices, a model of four layers. A blue box is what a device holds of a layer, a pale one what it gathers just
# while that layer computes. The letter above is the part of the batch that it works on, the number below the device.

# %%
BLUE, PALE, RED, GREY, INK = "#1649ff", "#dbe4ff", "#a21600", "#4b5563", "#1f2937"


def draw(title, description, height, fill):
    """A picture; `fill` draws on axes with one unit a pixel, from the upper left corner."""

    def fill_pixels(axes):
        axes.set(xlim=(0, 760), ylim=(height, 0), xticks=[], yticks=[])
        fill(axes)

    return HTML(picture(title, description, fill_pixels, {}, sides=(0, 0), heights=(0, height, 0)))


def text(axes, x, y, words, colour=INK, anchor="center", weight="normal"):
    axes.text(x, y, words, color=colour, ha=anchor, va="baseline", size=12, weight=weight)


def box(axes, x, y, width, fill, stroke="#8b95a3"):
    axes.barh(y + 10, width, 20, left=x, color=fill, edgecolor=stroke, linewidth=1, clip_on=False)


def panel(axes, place, name, note, above, rows, held, gathers=False):
    """Four devices in columns; `held(device, row)` is the stretch of a row's box that the device holds, or None."""
    x = 30 + 148 * place
    text(axes, x + 62, 18, name, weight="bold")
    text(axes, x + 62, 34, note, GREY)
    for device in range(4):
        left = x + 32 * device
        text(axes, left + 14, 56, above[device])
        text(axes, left + 14, 76 + 26 * rows, device, GREY)
        for row in range(rows):
            box(axes, left, 64 + 26 * row, 28, PALE if gathers else "#ffffff")
            if (part := held(device, row)) is not None:
                box(axes, left + 28 * part[0], 64 + 26 * row, 28 * (part[1] - part[0]), BLUE, BLUE)


def whole(device, row):
    return (0, 1)


def quarter(device, row):
    return (device / 4, (device + 1) / 4)


def layer(device, row):
    return (0, 1) if device == row else None


ways = (
    ("Data", "DDP", "ABCD", whole, "The whole model on each, a part of the batch on each. Gradients are averaged."),
    ("Sharded data", "ZeRO-3, FSDP", "ABCD", quarter, "As data, but each keeps a quarter of every layer."),
    ("Layers", "model parallel", "A   ", layer, "Each has some layers. The batch passes through; the others wait."),
    ("Pipeline", "GPipe, 1F1B", "1234", layer, "As layers, but micro-batches follow each other."),
    ("Tensor", "Megatron", "AAAA", quarter, "Each computes with its slice of every matrix. Results are summed."),
)


def draw_ways(axes):
    for place, (name, note, above, held, _) in enumerate(ways):
        panel(axes, place, name, note, above, 4, held, gathers=name == "Sharded data")
    for row in range(4):
        text(axes, 24, 78 + 26 * row, row + 1, GREY, "right")


description = " ".join(f"{name} ({note}): {effect}" for name, note, _, _, effect in ways)
draw("Five ways to put a model of four layers on four devices", description, 192, draw_ways)

# %%
table("", ("parallelism", "known as", "what happens"), [(name, note, said) for name, note, _, _, said in ways])

# %% [markdown]
# Sharded data parallelism looks like tensor parallelism *at rest*, and works like data parallelism: every device
# computes every layer whole, on its own data. That needs no change of the model, which is why it is the first thing
# to try. Inside it there are grades:

# %%
grades = (
    ("DDP", "", (whole, whole, whole)),
    ("ZeRO-1", "", (whole, whole, quarter)),
    ("ZeRO-2", "", (whole, quarter, quarter)),
    ("ZeRO-3", "", (quarter, quarter, quarter)),
    ("FSDP", "full shard, grad-op", (quarter, quarter, quarter)),
)


def draw_grades(axes):
    for place, (name, note, held) in enumerate(grades):
        panel(axes, place, name, note, "ABCD", 3, lambda device, row, held=held: held[row](device, row))
    for row, letter in enumerate("PGO"):
        text(axes, 24, 78 + 26 * row, letter, GREY, "right")
    legend = "P: parameters, G: gradients, O: optimizer states, twice the parameters with Adam."
    text(axes, 12, 172, legend, GREY, "left")


description = "Rows are parameters, gradients and optimizer states. " + " ".join(
    f"{name} keeps {held.count(whole)} of the three whole on every device." for name, _, held in grades
)
draw("What is sharded between two steps, on four devices", description, 184, draw_grades)

# %%
kept = {whole: "whole", quarter: "a quarter"}
rows = [(name, *(kept[one] for one in held)) for name, _, held in grades]
table("On each of four devices", ("", "parameters", "gradients", "optimizer states"), rows)

# %% [markdown]
# ## Why layers alone are slow: the bubble
#
# With layers on four devices, one works while three wait. A pipeline cuts the batch: S − 1 of its M + S − 1 turns are
# lost, where S are the stages and M the micro-batches (Huang et al. 2019). Here is that schedule, simulated.

# %%
STAGES, MICRO = 4, 4


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
    assert len(work) == 2 * stages * micro, "no stage does two things at once"
    return 1 - len(work) / (stages * (1 + max(time for _, time in work)))


for micro in (1, 2, 4, 16, 64):
    assert abs(idle(STAGES, micro) - (STAGES - 1) / (micro + STAGES - 1)) < 1e-12

waiting = f"{idle(STAGES, MICRO):.0%}"


def draw_schedule(axes):
    for stage in range(STAGES):
        text(axes, 60, 30 + 26 * stage, f"device {stage}", GREY)
    for (stage, time), (one, direction) in schedule(STAGES, MICRO).items():
        x, y, colour = 100 + 44 * time, 16 + 26 * stage, BLUE if direction == "forward" else RED
        box(axes, x, y, 42, colour, colour)
        text(axes, x + 21, y + 15, f"{direction[0].upper()}{one + 1}", "#ffffff")
    text(axes, 100, 144, f"F: forward, B: backward of a micro-batch. White is waiting: {waiting}.", GREY, "left")


description = (
    f"{STAGES} devices, {MICRO} micro-batches: forwards go down the devices, then backwards up. {waiting} is waiting."
)
draw("A pipeline of four stages over time", description, 156, draw_schedule)

# %%
rows = [(micro, f"{idle(STAGES, micro):.0%}") for micro in (1, 2, 4, 16, 64)]
table(f"Waiting, {STAGES} stages", ("micro-batches", "of the time"), rows)

# %% [markdown]
# ## Why tensor parallelism works: a sum of slices
#
# In an MLP the first matrix is cut by columns, the second by rows. Each device computes with its slices alone, and
# the sum of their results is the whole result (Shoeybi et al. 2019).

# %%
torch.manual_seed(0)
x, up, down = torch.randn(8, 64), torch.randn(64, 256) / 8, torch.randn(256, 64) / 16
together = torch.nn.functional.gelu(x @ up) @ down
slices = [torch.nn.functional.gelu(x @ a) @ b for a, b in zip(up.chunk(4, dim=1), down.chunk(4, dim=0), strict=True)]
assert torch.allclose(sum(slices), together, atol=1e-5)
print(f"largest difference of the sum of four slices: {(sum(slices) - together).abs().max():.0e}")

# %% [markdown]
# The toolkit launches tensor parallelism (`--tp 2`). Context parallelism and pipelines it does not launch yet, and says so
# instead of doing something else:

# %%
refused = {}
for dimension in ("cp", "pp"):
    try:
        tk.Strategy(sharding="fsdp", **{dimension: 2})
    except tk.StrategyError as error:
        refused[dimension] = str(error)
assert all("not available yet" in said for said in refused.values())
assert len(refused) == 2
print("\n".join(refused.values()))

# %% [markdown]
# ## Six ways, trained for real
#
# `tk.launch` starts processes of their own and comes back at once; the kernel stays free. Only one word differs
# between these runs. The model is a Llama of 5M parameters, the text Python's own sources, and the precision is the
# default: fp32 on a processor, bf16 on a GPU that has it.

# %%
WORDS = SHARDINGS.split(",")
runs = {}
for word in WORDS:
    run = tk.launch(
        "toolkit.finetune", tk.Strategy(sharding=word), processes=RANKS, steps=STEPS, save=False, save_seconds=0
    )
    runs[word] = run.wait(progress=word == WORDS[0])  # the first one is shown live
assert all(run.status == "finished" for run in runs.values())

results = {word: read_run(run.folder) for word, run in runs.items()}
comparison = Comparison(model="embedded", data="embedded", results=tuple(results.values()))
comparison

# %% [markdown]
# The first table says how fast each was and whether it learned the same, the second what it took: **measured** by the
# allocator, and behind the × what had been **forecast** before the launch, as a multiple of the measurement. On two
# cores of a processor the speeds mean little.

# %%
for result in results.values():
    assert abs(result.forecast["device"]["peak_bytes"] / result.measured["peak_bytes"] - 1) < (0.1 if GPU else 0.03)

# %% [markdown]
# ## Who holds what
#
# What the fullest rank holds at the highest point of the run. *Transient* is what comes and goes within a step:
# activations, gradients, buffers.

# %%
elements = tk.describe("embedded").elements
HALF = comparison.results[0].strategy["precision"] in ("bf16", "fp16")
WIDTH = {word: 2 if HALF and word.startswith("zero") else 4 for word in WORDS}  # bytes of a parameter: notebook 03
SHARDED = ("zero3", "fsdp", "fsdp_grad_op")
for word, result in results.items():
    share = elements * WIDTH[word] / (RANKS if word in SHARDED else 1)
    assert all(abs(held - share) < 0.04 * elements for held in result.parameter_bytes_per_rank)
    optimizer = 8 * elements / (1 if word == "ddp" else RANKS)
    assert abs(result.measured["parts"].get("optimizer", optimizer) - optimizer) < 0.08 * elements

chart = bars(
    [Bar(label=word, parts=result.measured["parts"]) for word, result in results.items()],
    title=f"At the peak, the fullest of {RANKS} ranks (measured)",
)
rows = [(word, *map(format_bytes, result.parameter_bytes_per_rank)) for word, result in results.items()]
show(chart, "Parameters held between steps", ("sharding", *(f"rank {rank}" for rank in range(RANKS))), rows)

# %% [markdown]
# Two ranks are few. In fp32 DeepSpeed keeps a second copy of its shard as *master*, and ZeRO-3 gathers into buffers:
# on two ranks it takes more than ZeRO-2, and saves only from more ranks on. FSDP has no second copy.

# %%
if {"zero2", "zero3", "fsdp"} <= set(WORDS) and RANKS == 2 and not HALF:
    peak = {word: results[word].measured["peak_bytes"] for word in ("zero2", "zero3", "fsdp")}
    assert peak["fsdp"] < peak["zero2"] < peak["zero3"]
    print({word: format_bytes(size) for word, size in peak.items()})

# %% [markdown]
# With the ranks the shards shrink. The **forecast**, of the states alone, between two steps:

# %%
COUNTS, STATES = (2, 4, 8, 16), ("parameters", "master", "optimizer")


def states_of(word, ranks):
    parts = tk.forecast("embedded", tk.Strategy(sharding=word), f"{ranks}x cpu").parts
    return sum(parts[part] for part in STATES) / 2**20


states = {word: [(ranks, states_of(word, ranks)) for ranks in COUNTS] for word in dict.fromkeys(("ddp", *WORDS))}
assert states["ddp"][0][1] == states["ddp"][-1][1]  # DDP never shrinks
assert all(line[-1][1] < line[0][1] for word, line in states.items() if word != "ddp")
rows = [(word, *(f"{size:.1f}" for _, size in line)) for word, line in states.items()]
chart = curve(states, title="States shrink with the ranks (forecast, fp32)", x="ranks", y="MiB a rank")
show(chart, "MiB of states a rank", ("sharding", *(f"{ranks} ranks" for ranks in COUNTS)), rows)

# %% [markdown]
# ## What is sent
#
# Ranks talk in *collectives*. The classic one, the **all-reduce**, gives everybody the sum of all. In a ring it is
# two halves: a **reduce-scatter** (each ends with the sum of one part) and an **all-gather** (each collects all
# parts). Each half sends (N − 1)/N of the tensor. Count it:


# %%
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


for ranks in (2, 4, 8):
    tensors = [torch.randn(1024) for _ in range(ranks)]
    summed, sent = ring(tensors)
    assert all(torch.allclose(one, sum(tensors), atol=1e-5) for one in summed)
    assert sent == [1024 * (ranks - 1) // ranks] * 2
    print(f"{ranks} ranks: {sent[0]} + {sent[1]} of 1024 elements sent by each")

# %% [markdown]
# DDP all-reduces gradients: 2 halves. ZeRO-1 and 2 reduce-scatter gradients, each rank steps its part, and all-gather
# the parameters: 2 halves as well. ZeRO-3 and FSDP gather parameters twice, for the forward and for the backward, and
# reduce-scatter gradients: 3 halves, half as much again. Grad-op keeps the gathered parameters until the backward: 2.
# The toolkit's forecast counts the same (these are **computed**, not measured):

# %%
HALVES = {
    "ddp": {"gradients": 2},
    "zero1": {"gradients": 1, "parameters": 1},
    "zero2": {"gradients": 1, "parameters": 1},
    "zero3": {"gradients": 1, "parameters": 2},
    "fsdp": {"gradients": 1, "parameters": 2},
    "fsdp_grad_op": {"gradients": 1, "parameters": 1},
}
share = (RANKS - 1) / RANKS * elements
volume = {
    word: {part: halves * share * (2 if HALF and part == "parameters" else 4) for part, halves in HALVES[word].items()}
    for word in WORDS
}
for word, run in runs.items():
    assert run.memory["forecast"]["communication_bytes"] == round(sum(volume[word].values()))
chart = bars(
    [Bar(label=word, parts=parts) for word, parts in volume.items()],
    title=f"Sent by a rank in a step, {RANKS} ranks (computed)",
)
rows = [(word, sum(HALVES[word].values()), format_bytes(sum(parts.values()))) for word, parts in volume.items()]
show(chart, "Sent by a rank in a step", ("sharding", "halves", "bytes"), rows)

# %% [markdown]
# ## Two families, one vocabulary
#
# DeepSpeed and FSDP name the same ideas differently. The toolkit's own table says which word is which engine's:

# %%
from toolkit.config.strategy import SHARDINGS as TABLE
from toolkit.engines.resolution import accelerate_config, resolve

rows = [(row.word, row.engine, ", ".join(row.aliases) or "–", row.shards) for row in TABLE.values()]
assert tk.Strategy(sharding="FULL_SHARD").sharding == "fsdp"
assert tk.Strategy(sharding="SHARD_GRAD_OP").sharding == "fsdp_grad_op"
table("", ("word", "engine", "FSDP1 calls it", "sharded"), rows)

# %% [markdown]
# And these are the fields of the files that `accelerate launch` reads, as each engine writes them for the same
# request. Take them from here rather than from memory: both are generated in this cell.


# %%
def written(word, offload="none"):
    """What the strategy becomes: the engine's part of the Accelerate config, and its settings for this model."""
    strategy = tk.Strategy(sharding=word, offload=offload)
    file = accelerate_config(strategy, RANKS)
    on = tk.hardware("2x A100-80GB")
    job = resolve(strategy, tk.TrainConfig(), tk.describe("embedded"), RANKS, on.device)
    return {
        **file,
        **file.get("deepspeed_config", {}),
        **file.get("fsdp_config", {}),
        **job.settings,
        **job.settings.get("zero_optimization", {}),
    }


zero2, zero3, moved = written("zero2"), written("zero3"), written("zero3", "cpu")
grad_op, full, away = written("fsdp_grad_op"), written("fsdp"), written("fsdp", "cpu")


def spelled(where, *names):
    return ", ".join(f"{name}: {where[name]}" for name in names)


rows = [
    ("engine", spelled(zero3, "distributed_type"), spelled(full, "distributed_type", "fsdp_version")),
    ("shard all", spelled(zero3, "zero_stage"), spelled(full, "fsdp_reshard_after_forward")),
    ("shard gradients and optimizer", spelled(zero2, "zero_stage"), spelled(grad_op, "fsdp_reshard_after_forward")),
    (
        "keep states on the host",
        spelled(moved, "offload_optimizer_device", "offload_param_device"),
        spelled(away, "fsdp_offload_params"),
    ),
    (
        "load without a copy on each rank",
        spelled(zero3, "zero3_init_flag"),
        spelled(full, "fsdp_cpu_ram_efficient_loading"),
    ),
    (
        "what is gathered at once",
        spelled(zero3, "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
        spelled(full, "fsdp_auto_wrap_policy", "wrap"),
    ),
    ("reduce gradients in", spelled(zero3, "communication_data_type"), spelled(full, "reduce_dtype")),
    ("clip gradients", spelled(zero3, "gradient_clipping"), "in the loop: clip_grad_norm_"),
]
table("", ("idea", "DeepSpeed", "FSDP2"), rows)

# %% [markdown]
# One pair is *not* equal, though tables often say so: `SHARD_GRAD_OP` and ZeRO-2. ZeRO-2 holds all parameters on
# every rank at all times. Grad-op holds its shard between steps, and all of them only from forward to backward. The
# audits above show it:

# %%
if {"zero2", "fsdp_grad_op"} <= set(WORDS):
    pair = {word: max(results[word].parameter_bytes_per_rank) / WIDTH[word] for word in ("zero2", "fsdp_grad_op")}
    assert abs(pair["fsdp_grad_op"] / pair["zero2"] - 1 / RANKS) < 0.01
    print({word: f"{count / elements:.0%} of all parameters on a rank" for word, count in pair.items()})

# %% [markdown]
# ## All learn the same
#
# Sharding changes where a number lies, not what it is. From the same checkpoint and over the same samples in the same
# order, the curves lie on each other; what differs is the order of sums.

# %%
for result in results.values():
    assert comparison.agrees(result)
lines = {word: list(enumerate(result.losses, start=1)) for word, result in results.items()}
rows = [
    (word, f"{result.losses[0]:.4f}", f"{result.losses[-1]:.4f}", f"{comparison.difference(result):.0e}")
    for word, result in results.items()
]
chart = curve(lines, title=f"{len(WORDS)} shardings, one curve", x="step", y="loss")
show(chart, "Losses", ("sharding", "first", "last", "largest relative difference"), rows)

# %% [markdown]
# ## Five lines: from a plain loop to an Accelerate one
#
# A plain PyTorch loop, on one process. The model is GPT-2-shaped and small, made here from its config.

# %%
import difflib
import io
import re
import runpy
from contextlib import redirect_stdout
from functools import cache
from html import escape
from pathlib import Path

from transformers import AutoTokenizer, GPT2Config, T5Config

from toolkit.data import embedded_files
from toolkit.training.preflight import random_model

shape = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 256, "vocab_size": 4096}
still = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = random_model(Path("gpt2-small").resolve(), GPT2Config(**shape, **still))

tokenizer = AutoTokenizer.from_pretrained(GPT2)
sources = "\n".join(path.read_text(encoding="utf-8") for path in embedded_files()[:40])
GLOBAL, LENGTH, LOOP_STEPS = 4 * RANKS, 64, min(STEPS, 8)
tokens = tokenizer(sources, verbose=False)["input_ids"][: LOOP_STEPS * GLOBAL * LENGTH]
torch.save(torch.tensor(tokens).view(-1, LENGTH), "rows.pt")

PLAIN = """
import sys
import torch
from transformers import AutoModelForCausalLM

model_folder, rows, batch = sys.argv[1], torch.load(sys.argv[2]), int(sys.argv[3])
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(rows, batch_size=batch)
for ids in loader:
    ids = ids.to(device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.9f}", flush=True)
""".lstrip()


def losses_in(said):
    return [float(found) for found in re.findall(r"^loss ([\d.]+)$", said, re.MULTILINE)]


def plain(script):
    """The losses of a script that is run here, in one process, with the whole batch."""
    before, sys.argv = sys.argv, [script, GPT2, "rows.pt", str(GLOBAL)]
    try:
        with redirect_stdout(io.StringIO()) as said:
            runpy.run_path(script)
    finally:
        sys.argv = before
    return losses_in(said.getvalue())


Path("plain.py").write_text(PLAIN)
alone = plain("plain.py")
assert len(alone) == LOOP_STEPS
print("one process:", [round(loss, 4) for loss in alone])

# %% [markdown]
# Five lines are added, and two of the old ones go. The batch is now a rank's part of the global one.

# %%
EDITS = {
    "import torch\n": "import torch\nfrom accelerate import Accelerator\n",
    'device = "cuda" if torch.cuda.is_available() else "cpu"\n': (
        "accelerator = Accelerator(cpu=not torch.cuda.is_available())\ndevice = accelerator.device\n"
    ),
    "batch_size=batch)\n": "batch_size=batch)\nmodel, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n",
    "loss.backward()": "accelerator.backward(loss)",
}
accelerated = PLAIN
for old, new in EDITS.items():
    assert accelerated.count(old) == 1
    accelerated = accelerated.replace(old, new)
Path("accelerated.py").write_text(accelerated)

changes = [line for line in difflib.ndiff(PLAIN.splitlines(), accelerated.splitlines()) if not line.startswith("?")]
assert sum(line.startswith("+") for line in changes) == 5
assert sum(line.startswith("-") for line in changes) == 2
colours = {"+": "#e6f4ea;color:#0b5323", "-": "#fdecea;color:#8a1c12"}
shown = "\n".join(f'<span style="background:{colours.get(line[0], "none")}">{escape(line)}</span>' for line in changes)
HTML(f'<pre style="background:#fff;color:{INK};padding:.6em">{shown}</pre>')

# %% [markdown]
# `tk.launch` takes scripts, too. Every rank prints the loss of its own part; their mean is the loss of the global
# batch.
#
# Accelerate's own `Accelerator` trains under DDP on a processor, but silently ignores FSDP and DeepSpeed there.
# `tk.accelerator()` makes a real `Accelerator` that shards everywhere. Two of the five lines are spelled otherwise
# then, and the same script runs under any word: here under **ZeRO-3 with everything offloaded to the host**.

# %%
OURS = {
    "from accelerate import Accelerator": "import toolkit as tk",
    "Accelerator(cpu=not torch.cuda.is_available())": (
        "tk.accelerator(train_config=tk.TrainConfig(micro_batch=batch, max_grad_norm=0))"
    ),
}
sharded = accelerated
for old, new in OURS.items():
    assert sharded.count(old) == 1
    sharded = sharded.replace(old, new)
Path("sharded.py").write_text(sharded)

plans = {
    "ddp": ("accelerated.py", tk.Strategy(sharding="ddp", precision="fp32")),
    "zero3": ("sharded.py", tk.Strategy(sharding="zero3", offload="cpu", precision="fp32")),
}
given = (GPT2, Path("rows.pt").resolve(), GLOBAL // RANKS)
curves = {"plain.py, 1 process": alone}
for word in SCRIPTS.split(","):
    script, strategy = plans[word]
    run = tk.launch(script, strategy, processes=RANKS, args=given).wait(progress=False)
    each = [losses_in(run.logs(rank)) for rank in range(RANKS)]
    offloaded = " + offload" if strategy.offload != "none" else ""
    curves[f"{script}, {word}{offloaded}, {RANKS} ranks"] = [sum(losses) / RANKS for losses in zip(*each, strict=True)]

assert len(curves) == 1 + len(SCRIPTS.split(","))
assert all(spread(losses, alone) < 1e-4 for losses in curves.values())
lines = {name: list(enumerate(losses, start=1)) for name, losses in curves.items()}
rows = [
    (name, f"{losses[0]:.5f}", f"{losses[-1]:.5f}", f"{spread(losses, alone):.0e}") for name, losses in curves.items()
]
chart = curve(lines, title="The same losses", x="step", y="loss")
show(chart, "Losses", ("run", "first", "last", "largest relative difference"), rows)

# %% [markdown]
# ## Worked example 1: a larger batch in the same memory
#
# A T5-shaped model on two GPUs. DDP keeps everything on both; ZeRO-2 shards what Adam needs, and the room goes to the
# batch. How much larger can it be? Ask the **forecast**, by bisection:

# %%
shape = {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16}
T5_LARGE = T5Config(vocab_size=32128, decoder_start_token_id=0, **shape)


def largest(spec, word, machine, seq_len, limit=None):
    """The forecast of the largest micro-batch that a rank has room for."""

    @cache
    def at(size):
        train_config = tk.TrainConfig(micro_batch=size, seq_len=seq_len)
        return tk.forecast(spec, tk.Strategy(sharding=word), machine, train_config)

    def fits(size):
        return at(size).peak_bytes <= (limit or at(size).limit_bytes)

    assert fits(1), "not one sample fits"
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return at(low)


def epoch_seconds(samples, batch, ranks, step_seconds):
    return -(-samples // (batch * ranks)) * step_seconds


EPOCH, machine, spec = 100_000, tk.hardware("2x RTX-4090"), tk.describe(T5_LARGE)
found = {word: largest(spec, word, machine, 512) for word in ("ddp", "zero2")}
batch = {word: one.train_config.micro_batch for word, one in found.items()}
epoch = {word: epoch_seconds(EPOCH, batch[word], 2, one.timing.step_seconds) for word, one in found.items()}
assert batch["zero2"] > 1.5 * batch["ddp"]
assert epoch["zero2"] < epoch["ddp"]
chart = bars(
    [Bar(label=f"{word}, micro-batch {batch[word]}", parts=one.parts) for word, one in found.items()],
    title="The same memory, put to another use (forecast)",
    limit=found["ddp"].limit_bytes,
    limit_label="an RTX 4090 has",
)
rows = [
    (
        word,
        batch[word],
        format_bytes(one.peak_bytes),
        format_step_seconds(one.timing.step_seconds),
        format_seconds(epoch[word]),
    )
    for word, one in found.items()
]
title = f"T5-large's shape ({format_count(spec.elements)}), 512 tokens; an epoch of {EPOCH:,} pairs"
show(chart, title, ("sharding", "largest micro-batch", "peak", "a step", "an epoch"), rows)

# %% [markdown]
# The bytes of such a forecast are usually within a percent or two; the seconds are a roofline over the card's speeds,
# mostly right to a quarter. Now the same experiment for real, small enough for this machine: a T5 of 8M parameters, and a
# limit that we set ourselves. Each trains with the largest batch that its forecast allows, and what it took is
# **measured**.

# %%
shape = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4, "vocab_size": 4096}
T5 = random_model(Path("t5-small").resolve(), T5Config(**shape, dropout_rate=0.0, decoder_start_token_id=0))
PAIRS, ROOM = 2_000, T5_LIMIT * 2**20
found = {word: largest(tk.describe(T5), word, MACHINE, LENGTH, ROOM) for word in ("ddp", "zero2")}
batch = {word: one.train_config.micro_batch for word, one in found.items()}
assert batch["zero2"] > batch["ddp"]
print(f"largest micro-batch within {T5_LIMIT} MiB, by forecast: {batch}")

# %%
rows = []
for word in filter(None, T5_RUNS.split(",")):
    asked = {"model": T5, "micro_batch": batch[word], "seq_len": LENGTH, "steps": max(3, STEPS), "lr": 1e-3}
    run = tk.launch(
        "toolkit.finetune", tk.Strategy(sharding=word), processes=RANKS, **asked, save=False, save_seconds=0
    )
    result = read_run(run.wait(progress=False).folder)
    peak = result.measured["peak_bytes"]
    assert peak <= ROOM * (1.25 if GPU else 1)  # CUDA's libraries take workspaces that no forecast knows
    assert result.losses[-1] < result.losses[0]
    step = statistics.median(event["seconds"] for event in read_events(run.folder / "events.jsonl"))
    took = format_step_seconds(step), format_seconds(epoch_seconds(PAIRS, batch[word], RANKS, step))
    rows.append((word, batch[word], format_bytes(peak), f"{result.losses[0]:.3f} → {result.losses[-1]:.3f}", *took))
columns = ("sharding", "micro-batch", "peak of a rank", "loss", "a step (median)", f"an epoch of {PAIRS:,} pairs")
table(f"A T5 of {format_count(tk.describe(T5).elements)} within {T5_LIMIT} MiB a rank (measured)", columns, rows)

# %% [markdown]
# On two cores a larger batch is hardly faster: the cores are busy with any batch. What a GPU gains is in the forecast
# above.
#
# ## Worked example 2: a model that only fits with offload
#
# A GPT-2-shaped model of ten billion parameters: the 48 layers of GPT-2 XL, wider. The machine has eight V100 of 16
# GB. Every strategy with every offload that it supports, by **forecast**:

# %%
huge = tk.describe(GPT2Config(n_embd=4096, n_layer=48, n_head=32, n_positions=1024))
machine, train_config = tk.hardware(NAMED), tk.TrainConfig(micro_batch=1, seq_len=1024)
tried = {}
for word, row in TABLE.items():
    if word in ("none", "hsdp"):
        continue
    for offload in row.offload:
        if offload not in ("nvme", "superoffload"):
            tried[word, offload] = tk.forecast(huge, tk.Strategy(sharding=word, offload=offload), machine, train_config)

fits = {key for key, one in tried.items() if one.fits}
assert ("zero3", "cpu") in fits
assert all(word in ("zero3", "fsdp") and offload != "none" for word, offload in fits), (
    "only what shards all, and offloads"
)
shown = ("zero2", "optimizer"), ("zero3", "none"), ("zero3", "cpu"), ("fsdp", "none"), ("fsdp", "cpu")
chart = bars(
    [Bar(label=f"{word}, offload {offload}", parts=tried[word, offload].parts) for word, offload in shown],
    title="What a GPU would hold (forecast)",
    limit=tried["zero3", "cpu"].limit_bytes,
    limit_label=f"a {NAMED.split()[-1]} has",
)
rows = [
    (*key, "fits" if one.fits else "no", format_bytes(one.peak_bytes), format_bytes(one.host_bytes))
    + ((format_step_seconds(one.timing.step_seconds),) if one.fits else ("–",))
    for key, one in tried.items()
]
columns = ("sharding", "offload", "", "peak of a GPU", "host memory", "a step")
show(chart, f"GPT-2's shape, {format_count(huge.elements)} parameters, on {NAMED} (forecast)", columns, rows)

# %% [markdown]
# Only ZeRO-3 with offload fits, and FSDP's offload, which is the same idea. The price: weights and gradients cross
# PCIe in every step, which then takes more than twice what it would take if there were room.

# %%
within, beyond = tried["zero3", "cpu"].timing, tried["zero3", "none"].timing
assert within.step_seconds > 2 * beyond.step_seconds
print(f"a step: {within.step_seconds:.1f} s with offload, {beyond.step_seconds:.1f} s without (forecast)")

here = tk.hardware()
if here.device.card == machine.device.card is not None and here.count >= machine.count:
    config = GPT2Config(n_embd=4096, n_layer=48, n_head=32, n_positions=1024, dtype="float16")
    asked = {"model": random_model(Path("gpt2-huge").resolve(), config), "micro_batch": 1, "seq_len": 1024, "steps": 3}
    run = tk.launch("toolkit.finetune", tk.Strategy(sharding="zero3", offload="cpu"), **asked, save=False).wait()
    print(format_bytes(run.memory["measured"]["peak_bytes"]), "measured,", tried["zero3", "cpu"].reason)
else:
    print(f"This machine is not {NAMED}: the figures above are a forecast, and nothing of that size was run here.")

# %% [markdown]
# Here, on CPU ranks, the same strategy ran at small size: `sharded.py` above, ZeRO-3 with offload `cpu`, with the
# losses of the plain loop. But **the bytes did not leave the device there**: on CPU ranks the host *is* the device,
# so offload moves nothing and saves nothing. The forecast says the same:


# %%
def peak_on(ranks, offload):
    strategy = tk.Strategy(sharding="zero3", offload=offload)
    return tk.forecast(tk.describe(GPT2), strategy, ranks, tk.TrainConfig(seq_len=LENGTH)).peak_bytes


cpu = {offload: peak_on(f"{RANKS}x cpu", offload) for offload in ("none", "cpu")}
gpu = {offload: tried["zero3", offload].peak_bytes for offload in ("none", "cpu")}
assert cpu["cpu"] > 0.9 * cpu["none"]
assert gpu["cpu"] < 0.25 * gpu["none"]
places = {f"the small GPT-2, {RANKS} CPU ranks": cpu, f"the large one, {NAMED}": gpu}
rows = [(place, *map(format_bytes, sizes.values())) for place, sizes in places.items()]
table("Peak of a rank under ZeRO-3 (forecast)", ("", "offload none", "offload cpu"), rows)

# %% [markdown]
# ## Exercises
#
# 1. Add `hsdp` to the runs: it needs four ranks (`processes=4`) and `tk.Strategy(sharding="hsdp", dp_replicate=2)`. What
#    does a rank hold, and why is that more than under `fsdp`?
# 2. Change `sharded.py`'s strategy to `fsdp` without offload. Nothing in the script changes. Are the losses equal?
# 3. For the T5 on two RTX 4090, what is the largest batch under `fsdp`? And with `activation_checkpointing="none"`?
#    Predict first.
# 4. On how many V100 of 16 GB does the ten-billion model fit *without* offload? Change `NAMED`; `tk.plan` answers it
#    for all strategies at once.
# 5. In the ring, how much does each rank send when N grows, and how many turns does it take? Which of the two decides
#    on a slow network, and which for a small tensor?
