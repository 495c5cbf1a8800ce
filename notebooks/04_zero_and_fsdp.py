# %% [markdown]
# # ZeRO and FSDP: who holds what
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/accelerate-toolkit/blob/main/notebooks/04_zero_and_fsdp.ipynb)
#
# Several processes train one model. They can share the *data*, the *layers*, the *matrices* of a layer, or the
# *states* that training needs. This notebook draws these ways, trains the same model under six of them with real
# processes, and looks at what each rank holds, what it sends, and whether all learn the same. Then two worked
# examples: a larger batch in the same memory, and a model that only fits with offload. What is **forecast** and what
# was **measured** is said each time.

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
GPU = tk.hardware().device.kind == "cuda" and tk.hardware().count > 1  # sharding takes two ranks, and each its own GPU
SHARDINGS = "ddp,zero1,zero2,zero3,fsdp,fsdp_grad_op"  # trained for real
STEPS = 50 if GPU else 8  # of each of these runs
SCRIPTS = "ddp,zero3"  # what the rewritten loop is run under
T5_RUNS = "ddp,zero2"  # what the first worked example is run under
T5_LIMIT = 200  # MiB that a rank may take in it
NAMED = "8x V100-16GB"  # the machine of the second worked example: as AWS p3.16xlarge

# %%
import os

import torch
import transformers
from IPython.display import HTML

from toolkit.comparing import read_run
from toolkit.drawing import Bar, bars, curve, figure
from toolkit.folder import read_events
from toolkit.show import Table
from toolkit.units import format_bytes, format_count, format_seconds

transformers.utils.logging.disable_progress_bar()
if not GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a single GPU cannot be shared by two ranks: they run on the processor
RANKS = tk.hardware().count if GPU else 2
MACHINE = tk.hardware(None if GPU else f"{RANKS}x cpu")

# %% [markdown]
# ## What can be shared
#
# Four devices, a model of four layers. A filled box is what a device holds of a layer; the letter above is the part
# of the batch that it works on.

# %%
BLUE, GREY, INK, LINE = "#1649ff", "#4b5563", "#1f2937", "#c4c9d1"


def picture(name, title, told, height, body):
    """An SVG with a title and a description, on a white ground of its own."""
    return HTML(
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="{name}-t {name}-d" viewBox="0 0 760 {height}" '
        f'width="760" style="max-width:100%;height:auto" font-family="system-ui,sans-serif" font-size="12">'
        f'<title id="{name}-t">{title}</title><desc id="{name}-d">{told}</desc>'
        f'<rect width="760" height="{height}" rx="8" fill="#fff"/>'
        f'<text x="12" y="24" font-size="15" font-weight="600" fill="{INK}">{title}</text>{"".join(body)}</svg>'
    )


def text(x, y, words, colour=INK, more='text-anchor="middle"'):
    return f'<text x="{x}" y="{y}" fill="{colour}" {more}>{words}</text>'


def panel(x, name, note, above, rows, share, gathered=False):
    """Four devices in columns; `share(device, row)` is the stretch of a row's box that the device holds, or None."""
    found = [text(x + 62, 52, name, more='text-anchor="middle" font-weight="600"'), text(x + 62, 68, note, GREY)]
    for device in range(4):
        left = x + 32 * device
        found.append(text(left + 14, 90, above[device]))
        for row in range(rows):
            top, dashes = 98 + 26 * row, ' stroke-dasharray="3 2"' if gathered else ""
            found.append(f'<rect x="{left}" y="{top}" width="28" height="20" fill="none" stroke="{LINE}"{dashes}/>')
            if (held := share(device, row)) is not None:
                wide = 28 * (held[1] - held[0])
                found.append(
                    f'<rect x="{left + 28 * held[0]:.1f}" y="{top}" width="{wide:.1f}" height="20" fill="{BLUE}"/>'
                )
        found.append(text(left + 14, 98 + 26 * rows + 12, device, GREY))
    return "".join(found)


def whole(device, row):
    return (0, 1)


def quarter(device, row):
    return (device / 4, (device + 1) / 4)


def layer(device, row):
    return (0, 1) if device == row else None


ways = (
    ("Data", "DDP", "ABCD", whole, "Each device has the whole model and a part of the batch. Gradients are averaged."),
    (
        "Sharded data",
        "ZeRO-3, FSDP",
        "ABCD",
        quarter,
        "As data, but each keeps a quarter of every layer, and gathers a layer just while it computes.",
    ),
    (
        "Layers",
        "naive model parallel",
        "A   ",
        layer,
        "Each has some layers. The batch passes from one to the next; the others wait.",
    ),
    (
        "Pipeline",
        "GPipe, 1F1B",
        "1234",
        layer,
        "As layers, but the batch is cut into micro-batches that follow each other.",
    ),
    (
        "Tensor",
        "Megatron",
        "AAAA",
        quarter,
        "Each has a slice of every matrix and computes with that slice. Results are summed in every layer.",
    ),
)
drawn = [
    panel(16 + 150 * place, name, note, above, 4, share, gathered=name == "Sharded data")
    for place, (name, note, above, share, _) in enumerate(ways)
]
drawn.append(text(12, 236, "Dashed: gathered whole while the layer computes. Below the boxes: the device.", GREY, ""))
told = " ".join(f"{name} ({note}): {said}" for name, note, _, _, said in ways)
picture("ways", "Five ways to put one model on four devices", told, 248, drawn)

# %%
HTML(
    Table(
        columns=("parallelism", "known as", "what happens"),
        rows=[(name, note, said) for name, note, _, _, said in ways],
    ).html()
)

# %% [markdown]
# Sharded data parallelism looks like tensor parallelism *at rest*, and works like data parallelism: every device
# computes every layer whole, on its own data. That needs no change of the model, which is why it is the first thing
# to try. Inside it there are grades:

# %%
grades = {
    "DDP": (whole, whole, whole),
    "ZeRO-1": (whole, whole, quarter),
    "ZeRO-2": (whole, quarter, quarter),
    "ZeRO-3": (quarter, quarter, quarter),
    "FSDP": (quarter, quarter, quarter),
}
notes = ("", "", "", "", "full shard, grad-op")
drawn = [
    panel(16 + 150 * place, name, note, "ABCD", 3, lambda device, row, shares=shares: shares[row](device, row))
    for place, ((name, shares), note) in enumerate(zip(grades.items(), notes, strict=True))
]
drawn.append(
    text(12, 210, "Rows: parameters, gradients, optimizer states. Adam's states are twice the parameters.", GREY, "")
)
told = "Rows are parameters, gradients and optimizer states. " + ". ".join(
    f"{name} keeps {sum(share is whole for share in shares)} of the three whole on every device"
    for name, shares in grades.items()
)
picture("grades", "The grades of sharding, on four devices", told, 222, drawn)

# %% [markdown]
# ## Why layers alone are slow: the bubble
#
# With layers on four devices, one works while three wait. A pipeline cuts the batch: at most S − 1 of its M + S − 1
# steps are lost, where S are the stages and M the micro-batches (Huang et al. 2019). Here is that schedule,
# simulated.

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

body = [text(60, 66 + 30 * stage, f"device {stage}", GREY) for stage in range(STAGES)]
for (stage, time), (one, way) in schedule(STAGES, MICRO).items():
    x, y = 100 + 44 * time, 46 + 30 * stage
    colour = BLUE if way == "forward" else "#a21600"
    body.append(f'<rect x="{x}" y="{y}" width="42" height="26" fill="{colour}"/>')
    body.append(text(x + 21, y + 18, f"{way[0].upper()}{one + 1}", "#fff"))
body.append(
    text(
        100,
        186,
        f"F: forward, B: backward of a micro-batch. White is waiting: {idle(STAGES, MICRO):.0%} of all.",
        GREY,
        "",
    )
)
told = f"{STAGES} devices, {MICRO} micro-batches: forwards run down the devices, then backwards up; {idle(STAGES, MICRO):.0%} is waiting."
picture("pipeline", "A pipeline of four stages", told, 198, body)

# %%
rows = [(micro, f"{idle(STAGES, micro):.0%}") for micro in (1, 2, 4, 16, 64)]
HTML(Table(title=f"Waiting, {STAGES} stages", columns=("micro-batches", "of the time"), rows=rows).html())

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
# The toolkit does not launch layers, pipelines or tensor parallelism yet, and says so instead of doing something
# else:

# %%
refused = {}
for degree in ("tensor", "pipeline"):
    try:
        tk.Strategy(sharding="fsdp", **{degree: 2})
    except tk.StrategyError as error:
        refused[degree] = str(error)
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
comparison = tk.Comparison(model="embedded", data="embedded", results=tuple(results.values()))
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
width = {
    word: 2 if HALF and word.startswith("zero") else 4 for word in WORDS
}  # bytes of a parameter, as notebook 03 shows
for word, result in results.items():
    sharded = word in ("zero3", "fsdp", "fsdp_grad_op")
    share = elements * width[word] / (RANKS if sharded else 1)
    for held in result.parameter_bytes_per_rank:
        assert abs(held - share) < 0.01 * elements * 4, (
            f"{word}: parameters are {'sharded' if sharded else 'whole'} on every rank"
        )
    optimizer = 8 * elements / (1 if word == "ddp" else RANKS)
    assert abs(result.measured["parts"].get("optimizer", optimizer) - optimizer) < 0.01 * elements * 8

rows = [Bar(label=word, parts=result.measured["parts"]) for word, result in results.items()]
each = [(word, *map(format_bytes, result.parameter_bytes_per_rank)) for word, result in results.items()]
told = Table(
    title="Parameters held between steps", columns=("sharding", *(f"rank {rank}" for rank in range(RANKS))), rows=each
)
HTML(figure(bars(rows, title=f"At the peak, the fullest of {RANKS} ranks (measured)"), told))

# %% [markdown]
# Two ranks are few. In fp32 DeepSpeed keeps a second copy of its shard as *master*, and ZeRO-3 gathers into buffers:
# on two ranks it takes more than ZeRO-2, and saves only from more ranks on. FSDP has no second copy. The **forecast**
# for more ranks (states alone, between two steps):

# %%
COUNTS = (2, 4, 8, 16)
STATES = ("parameters", "master", "optimizer")
states = {
    word: [
        (
            ranks,
            sum(tk.forecast("embedded", tk.Strategy(sharding=word), f"{ranks}x cpu").parts[part] for part in STATES)
            / 2**20,
        )
        for ranks in COUNTS
    ]
    for word in dict.fromkeys(("ddp", *WORDS))
}
assert states["ddp"][0][1] == states["ddp"][-1][1]  # DDP never shrinks
for word in WORDS:
    assert word == "ddp" or states[word][-1][1] < states[word][0][1]
rows = [(word, *(f"{size:.1f}" for _, size in line)) for word, line in states.items()]
told = Table(
    title="MiB of states a rank (forecast)", columns=("sharding", *(f"{ranks} ranks" for ranks in COUNTS)), rows=rows
)
HTML(figure(curve(states, title="States of a rank shrink with the ranks (forecast, fp32)", x="ranks", y="MiB"), told))

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
rows = [Bar(label=word, parts=parts) for word, parts in volume.items()]
each = [(word, sum(HALVES[word].values()), format_bytes(sum(parts.values()))) for word, parts in volume.items()]
told = Table(title="Sent by a rank in a step", columns=("sharding", "halves", "bytes"), rows=each)
HTML(figure(bars(rows, title=f"Sent by a rank in a step, {RANKS} ranks (computed)"), told))

# %% [markdown]
# ## Two families, one vocabulary
#
# DeepSpeed and FSDP name the same ideas differently. The toolkit's own table says which word is which engine's:

# %%
from toolkit.engines.job import engine_of, resolve
from toolkit.strategy import SHARDINGS as TABLE

rows = [(row.word, row.engine, ", ".join(row.aliases) or "–", row.shards) for row in TABLE.values()]
assert tk.Strategy(sharding="FULL_SHARD").sharding == "fsdp"
assert tk.Strategy(sharding="SHARD_GRAD_OP").sharding == "fsdp_grad_op"
HTML(Table(columns=("word", "engine", "FSDP1 calls it", "sharded"), rows=rows).html())

# %% [markdown]
# And these are the fields of the files that `accelerate launch` reads, as each engine writes them for the same
# request. Take them from here rather than from memory: both are generated in this cell.

# %%


def written(word, offload="none"):
    """What the strategy becomes: the engine's part of the Accelerate config, and its settings for this model."""
    strategy = tk.Strategy(sharding=word, offload=offload)
    file = engine_of(strategy).to_yaml(strategy, RANKS, 1)
    on = tk.hardware("2x A100-80GB")
    job = resolve(strategy, tk.Loop(), tk.describe("embedded"), RANKS, on.device)
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
HTML(Table(columns=("idea", "DeepSpeed", "FSDP2"), rows=rows).html())

# %% [markdown]
# One pair is *not* equal, though tables often say so: `SHARD_GRAD_OP` and ZeRO-2. ZeRO-2 holds all parameters on
# every rank at all times. Grad-op holds its shard between steps, and all of them only from forward to backward. The
# audits above show it:

# %%
if {"zero2", "fsdp_grad_op"} <= set(WORDS):
    pair = {word: max(results[word].parameter_bytes_per_rank) / width[word] for word in ("zero2", "fsdp_grad_op")}
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
told = Table(title="Losses", columns=("sharding", "first", "last", "largest relative difference"), rows=rows)
HTML(
    figure(
        curve(
            lines,
            title=f"Six shardings, one curve ({RANKS} ranks)" if len(WORDS) == 6 else "One curve",
            x="step",
            y="loss",
        ),
        told,
    )
)

# %% [markdown]
# ## Five lines: from a plain loop to an Accelerate one
#
# A plain PyTorch loop, on one process. The model is GPT-2-shaped and small, made here from its config.

# %%
import difflib
import io
import re
import runpy
import shutil
from contextlib import redirect_stdout
from html import escape
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GPT2Config, T5Config

from toolkit.data import embedded_files
from toolkit.readying import embedded_model


def made(folder, auto, config):
    """A checkpoint of random weights, with the embedded tokenizer."""
    torch.manual_seed(0)
    auto.from_config(config).save_pretrained(folder)
    for file in embedded_model().glob("token*"):
        shutil.copy(file, folder)
    return str(Path(folder).resolve())


small = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 256, "vocab_size": 4096}
gpt2 = made("gpt2-small", AutoModelForCausalLM, GPT2Config(**small, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0))

tokenizer = AutoTokenizer.from_pretrained(gpt2)
words = tokenizer("\n".join(path.read_text(encoding="utf-8") for path in embedded_files()[:6]), verbose=False)[
    "input_ids"
]
GLOBAL, LENGTH, LOOP_STEPS = 4 * RANKS, 64, min(STEPS, 8)
rows = torch.tensor(words[: LOOP_STEPS * GLOBAL * LENGTH]).view(-1, LENGTH)
torch.save(rows, "rows.pt")

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
    before, sys.argv = sys.argv, [script, gpt2, "rows.pt", str(GLOBAL)]
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
# Accelerate's own `Accelerator` trains under DDP on a processor, but drops FSDP and DeepSpeed there without a word.
# `tk.accelerator()` makes a real `Accelerator` that shards everywhere. Two of the five lines are spelled otherwise
# then, and the same script runs under any word: here under **ZeRO-3 with everything offloaded to the host**.

# %%
OURS = {
    "from accelerate import Accelerator": "import toolkit as tk",
    "Accelerator(cpu=not torch.cuda.is_available())": "tk.accelerator(loop=tk.Loop(micro_batch=batch, max_grad_norm=0))",
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
together = {}
for word in SCRIPTS.split(","):
    script, strategy = plans[word]
    run = tk.launch(
        script, strategy, processes=RANKS, args=(gpt2, str(Path("rows.pt").resolve()), GLOBAL // RANKS)
    ).wait(progress=False)
    ranks = [losses_in(run.logs(rank)) for rank in range(RANKS)]
    together[f"{script}, {word}" + (" + offload" if strategy.offload != "none" else "")] = [
        sum(part) / RANKS for part in zip(*ranks, strict=True)
    ]

for found in together.values():
    assert len(found) == LOOP_STEPS
    assert max(abs(a - b) / b for a, b in zip(found, alone, strict=True)) < 1e-4
lines = {"plain.py, 1 process": alone, **{f"{name}, {RANKS} ranks": found for name, found in together.items()}}
rows = [
    (
        name,
        f"{found[0]:.5f}",
        f"{found[-1]:.5f}",
        f"{max(abs(a - b) / b for a, b in zip(found, alone, strict=True)):.0e}",
    )
    for name, found in lines.items()
]
told = Table(title="Losses", columns=("run", "first", "last", "largest relative difference"), rows=rows)
lines = {name: list(enumerate(found, start=1)) for name, found in lines.items()}
HTML(figure(curve(lines, title="The same losses", x="step", y="loss"), told))

# %% [markdown]
# ## Worked example 1: a larger batch in the same memory
#
# A T5-shaped model on two GPUs. DDP keeps everything on both; ZeRO-2 shards what Adam needs, and the room goes to the
# batch. How much larger can it be? Ask the **forecast**, by bisection:

# %%
large = T5Config(
    vocab_size=32128, d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16, decoder_start_token_id=0
)


def largest(spec, word, machine, seq_len, limit=None):
    """The forecast of the largest micro-batch that a rank has room for."""

    def at(size):
        found = tk.forecast(
            spec, tk.Strategy(sharding=word), machine, tk.Loop(micro_batch=size, seq_len=seq_len), ranks=machine.ranks
        )
        return found, found.peak_bytes <= (limit or found.limit_bytes)

    low, high = 1, 2
    assert at(low)[1], "not one sample fits"
    while at(high)[1]:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle)[1] else (low, middle)
    return at(low)[0]


EPOCH, PAIR = 100_000, ("ddp", "zero2")


def epoch_seconds(samples, batch, ranks, step_seconds):
    return -(-samples // (batch * ranks)) * step_seconds


machine, spec = tk.hardware("2x RTX-4090"), tk.describe(large)
found = {word: largest(spec, word, machine, 512) for word in PAIR}
assert found["zero2"].loop.micro_batch > 1.5 * found["ddp"].loop.micro_batch
epochs = {
    word: epoch_seconds(EPOCH, one.loop.micro_batch, machine.ranks, one.timing.step_seconds)
    for word, one in found.items()
}
assert epochs["zero2"] < epochs["ddp"]
columns = ("sharding", "largest micro-batch", "peak of a rank", "a step", f"an epoch of {EPOCH:,} pairs")
each = [
    (
        word,
        one.loop.micro_batch,
        format_bytes(one.peak_bytes),
        format_seconds(one.timing.step_seconds),
        format_seconds(epochs[word]),
    )
    for word, one in found.items()
]
limit = next(iter(found.values())).limit_bytes
told = Table(
    title=f"T5-large's shape, {format_count(spec.elements)} parameters, 512 tokens (forecast)",
    columns=columns,
    rows=each,
)
bars_of = [Bar(label=f"{word}, batch {one.loop.micro_batch}", parts=one.parts) for word, one in found.items()]
HTML(
    figure(
        bars(bars_of, title="The same memory, another use (forecast)", limit=limit, limit_label="an RTX 4090 has"), told
    )
)

# %% [markdown]
# The bytes of such a forecast are usually within a percent or two; the seconds are a roofline from data sheets, right
# to about a quarter. Now the same experiment for real, small enough for this machine: a T5 of 8M parameters, and a
# limit that we set ourselves. Each trains with the largest batch that its forecast allows, and what it took is
# **measured**.

# %%
shape = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4, "vocab_size": 4096}
t5 = made("t5-small", AutoModelForSeq2SeqLM, T5Config(**shape, dropout_rate=0.0, decoder_start_token_id=0))
PAIRS, ROOM, LENGTH = 2_000, T5_LIMIT * 2**20, 64
found = {word: largest(tk.describe(t5), word, MACHINE, LENGTH, ROOM) for word in PAIR}
assert found["zero2"].loop.micro_batch > found["ddp"].loop.micro_batch

each = []
for word in T5_RUNS.split(","):
    batch = found[word].loop.micro_batch
    asked = {"model": t5, "micro_batch": batch, "seq_len": LENGTH, "steps": max(3, STEPS), "lr": 1e-3}
    run = tk.launch(
        "toolkit.finetune", tk.Strategy(sharding=word), processes=RANKS, **asked, save=False, save_seconds=0
    ).wait(progress=False)
    result = read_run(run.folder)
    peak = result.measured["peak_bytes"]
    assert peak <= ROOM * (1.25 if GPU else 1)  # CUDA's libraries take workspaces that no forecast knows
    assert result.losses[-1] < result.losses[0]
    seconds = sorted(event["seconds"] for event in read_events(run.folder / "events.jsonl"))
    step = seconds[len(seconds) // 2]
    epoch = epoch_seconds(PAIRS, batch, RANKS, step)
    each.append(
        (
            word,
            batch,
            format_bytes(peak),
            f"{result.losses[0]:.3f} → {result.losses[-1]:.3f}",
            format_seconds(step),
            format_seconds(epoch),
        )
    )
columns = ("sharding", "micro-batch", "peak of a rank", "loss", "a step (median)", f"an epoch of {PAIRS:,} pairs")
HTML(
    Table(title=f"A small T5 within {T5_LIMIT} MiB a rank, {RANKS} ranks (measured)", columns=columns, rows=each).html()
)

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
machine, loop = tk.hardware(NAMED), tk.Loop(micro_batch=1, seq_len=1024)
tried = {}
for word, row in TABLE.items():
    if word in ("none", "hsdp"):
        continue
    for offload in row.offload:
        if offload not in ("nvme", "superoffload"):
            tried[word, offload] = tk.forecast(huge, tk.Strategy(sharding=word, offload=offload), machine, loop)

fits = {key for key, one in tried.items() if one.fits}
assert ("zero3", "cpu") in fits
assert all(word in ("zero3", "fsdp") and offload != "none" for word, offload in fits), (
    "only what shards all, and offloads"
)
each = [
    (
        word,
        offload,
        "fits" if one.fits else "–",
        format_bytes(one.peak_bytes),
        format_bytes(one.host_bytes),
        format_seconds(one.timing.step_seconds) if one.fits else "–",
    )
    for (word, offload), one in tried.items()
]
columns = ("sharding", "offload", "", "peak of a GPU", "host memory", "a step")
told = Table(
    title=f"GPT-2's shape, {format_count(huge.elements)} parameters, on {NAMED} (forecast)", columns=columns, rows=each
)
shown = [
    ("ddp", "none"),
    ("zero2", "optimizer"),
    ("zero3", "none"),
    ("zero3", "optimizer"),
    ("zero3", "cpu"),
    ("fsdp", "none"),
    ("fsdp", "cpu"),
]
bars_of = [Bar(label=f"{word}, offload {offload}", parts=tried[word, offload].parts) for word, offload in shown]
limit = tried["zero3", "cpu"].limit_bytes
HTML(figure(bars(bars_of, title="What a GPU would hold (forecast)", limit=limit, limit_label="a V100 has"), told))

# %% [markdown]
# Only ZeRO-3 with offload fits, and FSDP's offload, which is the same idea. The price: weights and gradients cross
# PCIe in every step.

# %%
here, wanted = tk.hardware(), machine
if here.device.kind == "cuda" and here.device.name.endswith(wanted.device.name) and here.count >= wanted.count:
    config = GPT2Config(n_embd=4096, n_layer=48, n_head=32, n_positions=1024, dtype="float16")
    folder = made("gpt2-huge", AutoModelForCausalLM, config)
    run = tk.launch(
        "toolkit.finetune",
        tk.Strategy(sharding="zero3", offload="cpu"),
        model=folder,
        micro_batch=1,
        seq_len=1024,
        steps=3,
        save=False,
    )
    print(run.wait().memory["measured"]["peak_bytes"], "bytes measured,", tried["zero3", "cpu"].peak_bytes, "forecast")
else:
    print(f"This machine is not {NAMED}: the table above is a forecast, and nothing of that size was run here.")

# %% [markdown]
# Here, on CPU ranks, the same strategy ran at small size: `sharded.py` above, ZeRO-3 with offload `cpu`, with the
# losses of the plain loop. But **the bytes did not leave the device there**: on CPU ranks the host *is* the device,
# so offload moves nothing and saves nothing. The forecast says the same:

# %%
small = tk.describe(gpt2)
cpu = {
    offload: tk.forecast(
        small, tk.Strategy(sharding="zero3", offload=offload), f"{RANKS}x cpu", tk.Loop(seq_len=64)
    ).peak_bytes
    for offload in ("none", "cpu")
}
gpu = {offload: tried["zero3", offload].peak_bytes for offload in ("none", "cpu")}
assert cpu["cpu"] > 0.9 * cpu["none"]
assert gpu["cpu"] < 0.25 * gpu["none"]
rows = [
    (where, *map(format_bytes, sizes.values()))
    for where, sizes in (("the small GPT-2, CPU ranks", cpu), (f"the large one, {NAMED}", gpu))
]
HTML(
    Table(title="Peak of a rank under ZeRO-3 (forecast)", columns=("", "offload none", "offload cpu"), rows=rows).html()
)

# %% [markdown]
# ## Exercises
#
# 1. Add `hsdp` to the runs: it needs four ranks (`processes=4`) and `tk.Strategy(sharding="hsdp", replicate=2)`. What
#    does a rank hold, and why is that more than under `fsdp`?
# 2. Change `sharded.py`'s strategy to `fsdp` without offload. Nothing in the script changes. Are the losses equal?
# 3. For the T5 on two RTX 4090, what is the largest batch under `fsdp`? And with `activation_checkpointing="none"`?
#    Predict first.
# 4. On how many V100 of 16 GB does the ten-billion model fit *without* offload? Change `NAMED`; `tk.plan` answers it
#    for all strategies at once.
# 5. In the ring, how much does each rank send when N grows, and how many turns does it take? Which of the two decides
#    on a slow network, and which for a small tensor?
