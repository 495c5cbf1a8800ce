# %% [markdown]
# # Where the memory goes
#
# Training a model takes several times what the model weighs. Five things share the memory: **parameters**,
# **gradients**, **optimizer states**, **activations** and **logits**. Each is examined separately here: computed,
# forecast, measured. Then the same arithmetic tells what 7 billion parameters need, what their checkpoint weighs,
# what ZeRO shards away, and what gradient accumulation saves.

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
WIDTH = 1024 if GPU else 256  # hidden size: 0.15B parameters on a GPU, of 15 GiB at the least, 5M on a processor
LAYERS = 12 if GPU else 4
SEQ_LEN = 512 if GPU else 128
BATCHES = [1, 2, 4, 8]  # micro-batches; the largest is the global batch of the last section
VOCABULARIES = [4096, 16384, 65536] if GPU else [4096, 8192, 16384]
STEPS = 3
GPUS = 64  # of the ZeRO figure

# %% [markdown]
# ## A step as a staircase
#
# Nothing but torch here: a model as `tk.load` gives it, AdamW, one step. After each line of the step we add up
# the tensors that are there. What the forward keeps for the backward is seen by autograd's own hook.

# %%
import dataclasses
import json
from pathlib import Path

import torch
from IPython.display import HTML
from transformers import LlamaConfig

from toolkit.core.charts import Bar, bars, curve, figure
from toolkit.core.display import Table
from toolkit.core.units import GiB, MiB, format_bytes, format_count
from toolkit.data import embedded_files
from toolkit.training.preflight import random_model
from toolkit.training.step_profile import StepProfiles

shape = {
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH * 11 // 4,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": WIDTH // 64,
    "num_key_value_heads": WIDTH // 128,
    "vocab_size": VOCABULARIES[0],
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODEL = random_model("model", LlamaConfig(**shape))
spec = tk.describe(MODEL)
P = spec.elements

plain = tk.Strategy(precision="fp32", activation_checkpointing="none")
train_config = tk.TrainConfig(seq_len=SEQ_LEN, micro_batch=BATCHES[-1], steps=STEPS)
accelerator = tk.accelerator(plain, train_config, spec)
model, tokenizer = tk.load(accelerator)
model.to(accelerator.device)
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(3, 4096, (BATCHES[-1], SEQ_LEN), device=accelerator.device)
print(f"{format_count(P)} parameters, {ids.numel():,} tokens")

# %%
saved = {}


def keep(tensor):
    """Called with everything that the forward keeps for the backward."""
    storage = tensor.untyped_storage()
    kind = "logits" if tensor.shape[-1:] == (spec.vocab,) and tensor.is_floating_point() else "activations"
    saved[storage.data_ptr()] = (kind, storage.nbytes())
    return tensor


def total(tensors):
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def held():
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {key: value for key, value in saved.items() if key not in own}
    return {
        "parameters": total(model.parameters()),
        "gradients": total(parameter.grad for parameter in model.parameters()),
        "optimizer": total(
            tensor for state in optimizer.state.values() for tensor in state.values() if tensor.dim() > 0
        ),
        "activations": sum(size for kind, size in kept.values() if kind == "activations"),
        "logits": sum(size for kind, size in kept.values() if kind == "logits"),
    }


# %%
def forward():
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return model(input_ids=ids, labels=ids, use_cache=False).loss


stairs = {"loaded": held()}
loss = forward()
stairs["after the forward"] = held()
loss.backward()
saved.clear()
stairs["after the backward"] = held()
optimizer.step()
stairs["after the optimizer's step"] = held()
optimizer.zero_grad()
stairs["between steps"] = held()
loss = forward()
stairs["after the next forward"] = held()

assert stairs["loaded"]["parameters"] == 4 * P  # fp32
assert stairs["after the backward"]["gradients"] == 4 * P  # one number a parameter
assert stairs["after the optimizer's step"]["optimizer"] == 8 * P  # two moments a parameter, from the first step on
assert stairs["between steps"]["gradients"] == 0

# %%
parts = list(stairs["loaded"])
HTML(
    figure(
        bars([Bar(label=when, parts=found) for when, found in stairs.items()], title="Measured, tensor by tensor"),
        Table(
            columns=("when", *parts),
            rows=[(when, *(format_bytes(found[part]) for part in parts)) for when, found in stairs.items()],
        ),
    )
)

# %% [markdown]
# Sixteen bytes a parameter (4 weight, 4 gradient, 8 moments) are there at the same time, whatever the batch.
# Activations and logits come and go with every micro-batch. From the second step on the moments are there from
# the beginning: with many tokens the highest point lies where the forward ends and the backward begins.
#
# ## The same step, forecast
#
# `tk.forecast` knows that without running it; `tk.profile_steps` runs three steps in this process and lets the
# allocator say what was there. (`transient` is measured as one part: all that is not parameters or optimizer.)

# %%
import gc

del model, optimizer, loss, accelerator
saved.clear()
gc.collect()

# Short documents, so that a row holds several: pieces of Python's own sources.
pieces = [piece for path in embedded_files()[:60] for piece in path.read_text().split("\n\n") if len(piece) > 100]
Path("pieces.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
run_config = tk.RunConfig(model=MODEL, data="pieces.jsonl")
step = tk.profile_steps(plain, train_config, run_config)

assert step.parts["parameters"] == 4 * P
assert step.parts["optimizer"] == 8 * P
assert 0.95 < step.ratio < 1.05
step

# %% [markdown]
# ## Activations grow with the tokens
#
# States do not know the batch; what the forward keeps is proportional to it.

# %%
trials = {
    batch: tk.profile_steps(plain, dataclasses.replace(train_config, micro_batch=batch), run_config)
    for batch in BATCHES
}


def kept(trial):
    """Activations and logits at the end of a forward: measured, and forecast."""
    states = trial.parts["parameters"] + trial.parts["optimizer"]
    return trial.phases["forward"] - states, trial.forecast.phases["forward"] - states


for batch, trial in trials.items():
    measured, expected = kept(trial)
    assert trial.parts["parameters"] + trial.parts["optimizer"] == 12 * P
    assert abs(measured / (batch * kept(trials[BATCHES[0]])[0] / BATCHES[0]) - 1) < 0.1  # proportional
    assert abs(expected / measured - 1) < 0.05

lines = {
    "measured": [(batch, kept(trial)[0] / MiB) for batch, trial in trials.items()],
    "forecast": [(batch, kept(trial)[1] / MiB) for batch, trial in trials.items()],
    "weights and moments": [(batch, 12 * P / MiB) for batch in trials],
}
rows = [(batch, *(format_bytes(size) for size in kept(trial))) for batch, trial in trials.items()]
HTML(
    figure(
        curve(
            lines,
            title="What a forward keeps",
            x=f"micro-batch, of {SEQ_LEN} tokens each",
            y="MiB",
            spell_y="{:,.0f}".format,
        ),
        Table(columns=("micro-batch", "measured", "forecast"), rows=rows),
    )
)

# %% [markdown]
# ## Logits
#
# The last layer writes one number for each token and each word of the vocabulary, and the loss makes copies of
# it. With checkpointing on, and the vocabularies of today, this is often the largest part of all, and most
# estimates leave it out. How many bytes for each logit?

# %%
logits = {}
for vocabulary in VOCABULARIES:
    folder = random_model(f"vocabulary-{vocabulary}", LlamaConfig(**{**shape, "vocab_size": vocabulary}))
    logits[vocabulary] = tk.profile_steps(plain, train_config, dataclasses.replace(run_config, model=folder))

smallest, largest = VOCABULARIES[0], VOCABULARIES[-1]
more = (largest - smallest) * train_config.micro_batch * train_config.seq_len
measured, expected = ((kept(logits[largest])[at] - kept(logits[smallest])[at]) / more for at in (0, 1))

assert abs(expected / measured - 1) < 0.05
assert measured >= 8  # the logits themselves in fp32, and their softmax for the backward
print(f"bytes for each logit, where the forward ends: {measured:.1f} measured, {expected:.1f} forecast")
HTML(
    bars(
        [Bar(label=f"{vocabulary:,} words", parts=trial.forecast.parts) for vocabulary, trial in logits.items()],
        title="The peak with larger vocabularies, forecast",
    )
)

# %% [markdown]
# ## Seven billion parameters
#
# The same arithmetic, and the same forecast, for a model that this machine could not hold. Its config is enough,
# and nothing of it runs.

# %%
llama_7b = LlamaConfig(
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=32000,
    max_position_embeddings=4096,
)
seven = tk.describe(llama_7b)
one = tk.forecast(
    seven, tk.Strategy(precision="bf16"), "A100-80GB", tk.TrainConfig(seq_len=2048, micro_batch=1), one_document=True
)
rule = {
    "weights to use, in bf16": 2,
    "weights to train, in fp32": 4,
    "gradients, in fp32": 4,
    "AdamW's two moments, in fp32": 8,
}
training = sum(list(rule.values())[1:]) * seven.elements

assert seven.elements == 6_738_415_616  # what the published weights of Llama 2 7B hold
assert training == 16 * seven.elements > 80 * GiB  # no A100 holds it
assert not one.fits
assert one.peak_bytes > training * 0.75
Table(
    title=f"{format_count(seven.elements)} parameters",
    columns=("what", "bytes a parameter", "all"),
    rows=[(what, size, format_bytes(size * seven.elements)) for what, size in rule.items()],
    notes=(f"To train: {format_bytes(training)}, and activations and logits on top.",),
)

# %%
one

# %% [markdown]
# ### The rule of 56 GB
#
# Many guides give 56 GB for full fine-tuning of a 7B model. They count two bytes for everything: weights, gradients and
# each of AdamW's moments in bf16. The toolkit calls that `bf16_pure`. Here one step of torch's AdamW shows the bytes of each.

# %%
layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
adamw = torch.optim.AdamW(layer.parameters())
layer(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
adamw.step()
state = adamw.state[layer.weight]
each = {
    "weights": layer.weight.nbytes / layer.weight.numel(),
    "gradients": layer.weight.grad.nbytes / layer.weight.numel(),
    "AdamW's two moments": (state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes) / layer.weight.numel(),
}
gigabytes_of_7b = {what: size * 7e9 / 1e9 for what, size in each.items()}
pure = tk.forecast(
    seven,
    tk.Strategy(precision="bf16_pure"),
    "A100-80GB",
    tk.TrainConfig(seq_len=2048, micro_batch=1),
    one_document=True,
)

assert list(gigabytes_of_7b.values()) == [14, 14, 28]
assert sum(gigabytes_of_7b.values()) == 56
assert pure.parts["parameters"] == 2 * seven.elements
assert pure.parts["optimizer"] == 4 * seven.elements
assert pure.peak_bytes > 0.9 * 8 * seven.elements  # and activations, logits and buffers on top
assert pure.fits
Table(
    title="7 billion parameters, everything in bf16",
    columns=("what", "bytes a parameter", "GB"),
    rows=[(what, f"{size:g}", f"{gigabytes_of_7b[what]:g}") for what, size in each.items()],
    notes=(
        f"In all {sum(gigabytes_of_7b.values()):g} GB. Masters and moments in fp32, as above, make it {16 * 7} GB.",
        f"The forecast of Llama 2 7B in bf16_pure: a peak of {pure.peak_bytes / 1e9:.1f} GB.",
    ),
)

# %% [markdown]
# ### Its checkpoint
#
# To go on exactly where it stopped, a run needs the fp32 weights and both moments: twelve bytes a parameter.
# Gradients are computed again. What is published at the end is the weights alone. Here a real checkpoint of the small
# model is written and weighed. Frameworks that save the bf16 weights beside the fp32 ones write fourteen bytes.

# %%
from toolkit.checkpoints import CheckpointWriter, identify
from toolkit.training.optimizers import make_optimizer, make_schedule

loop_one = tk.TrainConfig(seq_len=SEQ_LEN, micro_batch=1, steps=1, lr=1e-3)
accelerator = tk.accelerator(plain, loop_one, spec)
model, tokenizer = tk.load(accelerator)
optimizer = make_optimizer(model, loop_one)
schedule = make_schedule(optimizer, loop_one)
model, optimizer, schedule = tk.prepare(accelerator, model, optimizer, schedule)
ours = tk.prepared(accelerator, (model, optimizer))
saver = CheckpointWriter(ours, schedule, Path("checkpoints"), identify(spec, plain, "no data"), versions={})
saver.save(1)
saver.wait_published(1)
written = sum(file.stat().st_size for file in Path("checkpoints").rglob("*") if file.is_file())
expected = step.forecast.checkpoint_bytes

assert expected == 12 * P
assert one.checkpoint_bytes == 12 * seven.elements
assert 1 <= written / expected < 1.05
Table(
    columns=("model", "checkpoint, forecast", "on disk", "its weights in bf16"),
    rows=[
        (format_count(P), format_bytes(expected), format_bytes(written), format_bytes(2 * P)),
        (format_count(seven.elements), format_bytes(one.checkpoint_bytes), "–", format_bytes(2 * seven.elements)),
    ],
)

# %%
llama_70b = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=32000,
    max_position_embeddings=4096,
)
seventy = tk.describe(llama_70b)
eight_nodes = tk.forecast(
    seventy,
    tk.Strategy(sharding="zero3", precision="bf16"),
    "8 nodes x 8x H100-80GB",
    tk.TrainConfig(seq_len=2048, micro_batch=1),
    one_document=True,
)
ours_each = eight_nodes.checkpoint_bytes / seventy.elements
with_bf16_copy = ours_each + torch.bfloat16.itemsize
checkpoints_70b = {what: size * 70e9 / 1e9 for what, size in (("usual", with_bf16_copy), ("ours", ours_each))}

assert (with_bf16_copy, ours_each) == (14, 12)
assert checkpoints_70b == {"usual": 980, "ours": 840}
Table(
    title="A checkpoint of 70 billion parameters",
    columns=("what is saved", "bytes a parameter", "GB"),
    rows=[
        ("bf16 weights, fp32 weights, two moments", f"{with_bf16_copy:g}", f"{checkpoints_70b['usual']:g}"),
        ("fp32 weights, two moments: the toolkit's", f"{ours_each:g}", f"{checkpoints_70b['ours']:g}"),
    ],
)

# %% [markdown]
# ## ZeRO: who holds how much
#
# The figure of the ZeRO paper (Rajbhandari et al. 2020, figure 1): 7.5 billion parameters in mixed precision, 2
# bytes of weights, 2 of gradients and 12 of optimizer states (an fp32 copy and the two moments) each. Stage 1
# shards the optimizer states over the GPUs, stage 2 the gradients too, stage 3 the weights too.

# %%
STAGES = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}


def zero(parameters, gpus, stage):
    """Bytes of states on one GPU."""
    return {
        "parameters": 2 * parameters / (gpus if stage >= 3 else 1),
        "gradients": 2 * parameters / (gpus if stage >= 2 else 1),
        "optimizer": 12 * parameters / (gpus if stage >= 1 else 1),
    }


def gigabytes(size):
    return f"{size / 1e9:,.1f} GB"


def zero_figure(gpus, parameters=7.5e9):
    found = {name: zero(parameters, gpus, stage) for name, stage in STAGES.items()}
    rows = [(name, *map(gigabytes, parts.values()), gigabytes(sum(parts.values()))) for name, parts in found.items()]
    drawn = bars(
        [Bar(label=name, parts=parts) for name, parts in found.items()],
        title=f"States of {format_count(parameters)} parameters on each of {gpus} GPU{'s' if gpus > 1 else ''}",
        limit=tk.hardware("A100-80GB").device.total_bytes,
        limit_label="an A100-80GB has",
        spell=gigabytes,
    )
    columns = ("", "parameters", "gradients", "optimizer", "all")
    return HTML(figure(drawn, Table(columns=columns, rows=rows)))


# %%
published = {"DDP": 120, "ZeRO-1": 31.4, "ZeRO-2": 16.6, "ZeRO-3": 1.9}  # GB, in the paper
for name, size in published.items():
    computed = sum(zero(7.5e9, 64, STAGES[name]).values()) / 1e9
    assert abs(computed - size) < 0.05
zero_figure(GPUS)

# %% [markdown]
# Move the slider (it needs a running kernel; above stands the picture for one number of GPUs, below the curve
# over all of them).

# %%
if importlib.util.find_spec("ipywidgets"):
    import ipywidgets

    numbers = [2**power for power in range(11)]
    slider = ipywidgets.SelectionSlider(options=numbers, value=min(GPUS, numbers[-1]), description="GPUs")
    ipywidgets.interact(zero_figure, gpus=slider, parameters=ipywidgets.fixed(7.5e9))

# %%
powers = range(11)
shares = {
    name: [(power, sum(zero(7.5e9, 2**power, stage).values())) for power in powers] for name, stage in STAGES.items()
}
for name, points in shares.items():
    sizes = [size for _, size in points]
    assert sizes == sorted(sizes, reverse=True)
    floor = {"DDP": 16, "ZeRO-1": 4, "ZeRO-2": 2, "ZeRO-3": 0}[name] * 7.5e9
    assert sizes[-1] - floor < 0.01 * sizes[0]  # what no number of GPUs shards away
HTML(
    curve(
        shares, title="States on each GPU", x="GPUs, as a power of 2", y="bytes of 7.5B parameters", spell_y=gigabytes
    )
)

# %% [markdown]
# ### What engines hold today
#
# The paper counts states. A forecast counts what DeepSpeed really holds, gathers and copies in a step, and the
# activations. The 7B model again, on as many A100 as the figure:

# %%
nodes = max(1, GPUS // 8)
machine = f"{nodes} nodes x 8x A100-80GB"
words = {"DDP": "ddp", "ZeRO-1": "zero1", "ZeRO-2": "zero2", "ZeRO-3": "zero3"}
sharded = {
    name: tk.forecast(
        seven,
        tk.Strategy(sharding=word, precision="bf16"),
        machine,
        tk.TrainConfig(seq_len=2048, micro_batch=1),
        one_document=True,
    )
    for name, word in words.items()
}
HTML(
    bars(
        [Bar(label=name, parts=found.parts) for name, found in sharded.items()],
        title=f"Llama 2 7B on {8 * nodes} A100: the fullest rank at its peak, forecast",
        limit=sharded["DDP"].limit_bytes,
        limit_label="an A100-80GB has",
    )
)

# %%
paper = {name: sum(zero(seven.elements, 8 * nodes, stage).values()) for name, stage in STAGES.items()}
peaks = {name: found.peak_bytes for name, found in sharded.items()}

assert not sharded["DDP"].fits
assert all(sharded[name].fits for name in ("ZeRO-1", "ZeRO-2", "ZeRO-3"))
assert all(peaks[name] > paper[name] for name in STAGES)  # states are not all
assert list(peaks.values()) == sorted(peaks.values(), reverse=True)
Table(
    columns=("", "states, by the paper", "peak, forecast", "in", "fits"),
    rows=[
        (
            name,
            format_bytes(paper[name]),
            format_bytes(found.peak_bytes),
            found.peak_phase,
            "yes" if found.fits else "no",
        )
        for name, found in sharded.items()
    ],
    notes=(
        "DDP keeps weights, gradients and moments in fp32 here: the paper's 16 bytes a parameter, and no bf16 copy.",
        "Where the peak lies in prepare, the engine is handed the whole model in fp32, before anything is sharded.",
    ),
)

# %% [markdown]
# ## Gradient accumulation
#
# A global batch need not go through the model at once. `accumulation` micro-batches add up their gradients before
# one optimizer step: the same batch, the same loss, the same step. What the forward keeps shrinks with the
# micro-batch; states stay, and so do the gradients of the micro-batches before.

# %%
largest = BATCHES[-1]
ways = {
    f"{micro} x {largest // micro}": tk.profile_steps(
        plain, dataclasses.replace(train_config, micro_batch=micro, accumulation=largest // micro), run_config
    )
    for micro in reversed(BATCHES)
}
whole, *split = ways.values()
gradients = 4 * P  # of the micro-batches before: there while the next one goes forward
keeps = {
    trial.forecast.train_config.micro_batch: kept(trial)[0]
    - (gradients if trial.forecast.train_config.accumulation > 1 else 0)
    for trial in ways.values()
}

for trial in split:
    assert all(abs(one - other) < 1e-4 for one, other in zip(whole.losses, trial.losses, strict=True))  # the same steps
    assert [step.tokens for step in trial.steps] == [step.tokens for step in whole.steps]
    assert trial.parts["optimizer"] == whole.parts["optimizer"]
for micro, size in keeps.items():
    assert abs(size / micro / (keeps[largest] / largest) - 1) < 0.1  # proportional to the micro-batch
StepProfiles(title=f"A global batch of {largest}: micro-batch x accumulation", trials=ways)

# %%
HTML(
    curve(
        {name: list(enumerate(trial.losses, start=1)) for name, trial in ways.items()},
        title="The loss does not know how the batch was split",
        x="step",
        y="nats a token",
    )
)

# %% [markdown]
# ## Exercises
#
# 1. Set `activation_checkpointing="full"` in `plain`. Which step of the staircase changes, and by how much?
# 2. The gradients of a micro-batch of 1 are as large as those of 8. Why does accumulation not shrink them, and
#    what would?
# 3. How many GPUs does ZeRO-3 need until the states of 70 billion parameters fit an A100-80GB? Find it with
#    `zero`, then ask `tk.forecast` what else has to fit.
# 4. `tk.Strategy(precision="bf16_pure")` halves the sixteen bytes. Forecast the 7B model with it on one H100, and
#    read in [05_precision](05_precision.ipynb) what it costs.
# 5. Put your own model's `config.json` in place of `llama_7b`.
