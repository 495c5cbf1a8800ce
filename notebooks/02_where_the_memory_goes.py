# %% [markdown]
# # Where the memory goes
#
# The weights of a model fit on your card, and its training does not. What else takes the memory, and which of it can
# you make smaller?

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
# - **You know** how to launch a run ([01_first_run](01_first_run.ipynb)), and that a forward pass is followed by a
#   backward pass and a step of the optimizer.
# - **You can then** compute the memory of a training on paper, tell which part is too large, and repair a run that is
#   out of memory.
# - **Time** about 3 minutes on two processor cores.
# - **Hardware** a processor is enough. A GPU gets a larger model. The forecast below says what the numbers that you
#   set need, here, on a T4 and on an L4.
#
# Words that you meet here:
#
# | word | meaning |
# |---|---|
# | parameters | the numbers that are trained; weights |
# | gradients | for each parameter, the direction of the next step |
# | optimizer states | what AdamW keeps for each parameter: two running averages, its *moments* |
# | master | a copy of the weights in fp32, where the model computes in 16 bits |
# | activations | what the forward keeps because the backward needs it |
# | logits | one number for each token and each word of the vocabulary, before the loss |
# | micro-batch | the rows that a rank reads at once |
# | buffer, workspace | memory that a library takes for messages between ranks, or during one operation |
# | reserved | what the allocator took from the card, used or not |

# %%
import toolkit as tk

tk.environment()

# %% [markdown]
# Change these values and run everything again.

# %% tags=["parameters"]
GPU = tk.hardware().device.kind == "cuda"
WIDTH = 1024 if GPU else 256  # hidden size: 0.15B parameters on a GPU, 5M on a processor
LAYERS = 12 if GPU else 4
SEQ_LEN = 512 if GPU else 128
BATCHES = [1, 2, 4, 8]  # micro-batches; the largest is the global batch of the section on accumulation
VOCABULARIES = [4096, 16384, 65536] if GPU else [4096, 8192, 16384]
STEPS = 3
GPUS = 64  # of the ZeRO figure
CRASH_ROWS = 4096 if GPU else 64  # rows that are too many in «When it goes wrong»

# %% tags=["helper"]
import contextlib
import dataclasses
import gc
import json
import threading
import time
from pathlib import Path

import psutil
import torch
from transformers import LlamaConfig

from toolkit.core.charts import Bar, bars, figure
from toolkit.core.display import Table
from toolkit.core.units import GiB, format_bytes, format_count
from toolkit.data import embedded_files
from toolkit.run_folder.heartbeat import read_beats
from toolkit.training.preflight import random_model
from toolkit.training.step_profile import StepProfiles

Path("runs").mkdir(exist_ok=True)
SHAPE = {
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH * 11 // 4,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": WIDTH // 64,
    "num_key_value_heads": WIDTH // 128,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    words: random_model(f"runs/words-{words}-{WIDTH}x{LAYERS}", LlamaConfig(**SHAPE, vocab_size=words))
    for words in VOCABULARIES
}
pieces = [piece for path in embedded_files()[:60] for piece in path.read_text().split("\n\n") if len(piece) > 100]
_ = Path("runs/pieces.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
plain = tk.Strategy(precision="fp32", activation_checkpointing="none", loss="whole")
spec = tk.describe(MODELS[VOCABULARIES[0]])
P = spec.elements


def needs(*runs):
    """What a rank of the largest of these runs needs, forecast with the run's own settings for three machines."""
    rows = []
    for machine in ("1x cpu", "1x T4", "1x L4"):
        try:
            options = {"ranks": 1, "save": False, "num_checkpoints": 0, "advice": False}
            forecasts = [tk.forecast(spec, strategy, machine, step, **options) for spec, strategy, step in runs]
        except tk.StrategyError as refusal:
            rows.append((machine, "–", "–", str(refusal)))
            continue
        most = max(forecasts, key=lambda forecast: forecast.needed_bytes)
        fits = "yes" if most.fits else "no"
        rows.append((machine, most.strategy.precision, format_bytes(most.needed_bytes), fits))
    columns = ("machine", "precision", "a rank needs", "fits")
    return Table(title="What this notebook's runs need", columns=columns, rows=rows)


class Step:
    """One training step in plain torch, stopped after each line to add up the tensors that are there."""

    def __init__(self, rows):
        accelerator = tk.accelerator(plain, tk.TrainConfig(seq_len=SEQ_LEN, micro_batch=rows), spec)
        self.model = tk.load(accelerator)[0].to(accelerator.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.ids = torch.randint(3, 4096, (rows, SEQ_LEN), device=accelerator.device)
        self.saved = {}

    def keep(self, tensor):
        """Called by autograd with everything that the forward keeps for the backward."""
        storage = tensor.untyped_storage()
        kind = "logits" if tensor.shape[-1:] == (spec.vocab,) and tensor.is_floating_point() else "activations"
        self.saved[storage.data_ptr()] = (kind, storage.nbytes())
        return tensor

    def forward(self):
        with torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor):
            return self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss

    def held(self):
        total = lambda tensors: sum(tensor.nbytes for tensor in tensors if tensor is not None)  # noqa: E731
        own = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        kept = [pair for key, pair in self.saved.items() if key not in own]
        states = self.optimizer.state.values()
        return {
            "parameters": total(self.model.parameters()),
            "gradients": total(parameter.grad for parameter in self.model.parameters()),
            "optimizer": total(tensor for state in states for tensor in state.values() if tensor.dim() > 0),
            "activations": sum(size for kind, size in kept if kind == "activations"),
            "logits": sum(size for kind, size in kept if kind == "logits"),
        }


def stairs(rows):
    """What is held after each line of the first step and of the second one's forward."""
    step = Step(rows)
    found = {"loaded": step.held()}
    loss = step.forward()
    found["forward"] = step.held()
    loss.backward()
    step.saved.clear()
    found["backward"] = step.held()
    step.optimizer.step()
    found["optimizer's step"] = step.held()
    step.optimizer.zero_grad()
    found["gradients freed"] = step.held()
    loss = step.forward()
    found["next forward"] = step.held()
    return found


measured_stairs = {rows: stairs(rows) for rows in BATCHES}
gc.collect()


def staircase(rows):
    found = measured_stairs[rows]
    table = Table(
        columns=("after", *found["loaded"]),
        rows=[(when, *map(format_bytes, parts.values())) for when, parts in found.items()],
    )
    return figure(bars([Bar(label=when, parts=parts) for when, parts in found.items()], title="Measured"), table)


# %% [markdown]
# The largest run in this process has all rows and the largest vocabulary:

# %%
batch = tk.TrainConfig(seq_len=SEQ_LEN, micro_batch=BATCHES[-1], steps=STEPS)
largest_run = needs((tk.describe(MODELS[VOCABULARIES[-1]]), plain, batch))
largest_run

# %% [markdown]
# ## One step, line by line
#
# **Your guess:** how many bytes does a training need for each parameter, before it has read a single row? The model
# here is in fp32, 4 bytes a number.
#
# Below, a training step runs in plain PyTorch. After each line, the bytes of all tensors are added up. Move the rows,
# and see which colours grow.

# %%
tk.vary(staircase, rows=BATCHES, start={"rows": BATCHES[-1]}, title="What is held after each line of a step")

# %% tags=["check"]
for found in measured_stairs.values():
    assert found["loaded"]["parameters"] == 4 * P
    assert found["optimizer's step"]["optimizer"] == 8 * P  # two moments a parameter, from the first step on
    assert found["gradients freed"]["gradients"] == 0
first, last = measured_stairs[BATCHES[0]], measured_stairs[BATCHES[-1]]
assert first["backward"]["gradients"] == last["backward"]["gradients"] == 4 * P
kept = {rows: found["forward"]["activations"] + found["forward"]["logits"] for rows, found in measured_stairs.items()}
assert abs(kept[BATCHES[-1]] / kept[BATCHES[0]] / (BATCHES[-1] / BATCHES[0]) - 1) < 0.1  # proportional to the rows

# %% [markdown]
# Sixteen bytes a parameter are there whatever you do: 4 weight, 4 gradient, 8 moments. Activations and logits come and
# go with each micro-batch, and grow with its tokens. The highest point lies where a forward ends.
#
# ## The same step, forecast
#
# `tk.forecast` computes these bytes without running anything. Change the length, the rows, the attention kernel and
# the precision:

# %%
knobs = ["seq_len", "micro_batch", "attention", "precision", "activation_checkpointing"]
tk.explore("memory", spec, None if GPU else "1x cpu", plain, batch, controls=knobs)

# %% [markdown]
# Is it true? `tk.profile_steps` trains for a few steps in this process, and lets the allocator say what was there.

# %%
data = tk.RunConfig(model=MODELS[VOCABULARIES[0]], data="runs/pieces.jsonl")
tk.profile_steps(plain, batch, data)


# %% tags=["helper"]
def profile(words, loss, rows=BATCHES[-1], accumulation=1):
    strategy = dataclasses.replace(plain, loss=loss)
    train_config = dataclasses.replace(batch, micro_batch=rows, accumulation=accumulation)
    return tk.profile_steps(strategy, train_config, dataclasses.replace(data, model=MODELS[words]))


losses = ("whole", "chunked")
vocabularies = {(words, loss): profile(words, loss) for words in VOCABULARIES for loss in losses}
splits = {rows: profile(VOCABULARIES[0], "whole", rows, BATCHES[-1] // rows) for rows in BATCHES}


def forward_bytes(trial):
    """Activations and logits where the forward ends, measured."""
    return trial.phases["forward"] - trial.parts["parameters"] - trial.parts["optimizer"]


# %% [markdown]
# ## Logits, the part that estimates forget
#
# The last layer writes one number for each token and each word, in fp32, and the loss needs a copy. With today's
# vocabularies of 128,000 words this is often the largest part of all. Move the vocabulary. Then let the loss be
# computed in chunks: the same loss, and the whole table is never there.


# %%
def with_words(words, loss):
    return vocabularies[words, loss]


tk.vary(with_words, words=VOCABULARIES, loss=losses, start={"words": VOCABULARIES[-1], "loss": "whole"})

# %% tags=["check"]
smallest, largest = VOCABULARIES[0], VOCABULARIES[-1]
most_needed = max(trial.forecast.needed_bytes for trial in vocabularies.values())
assert GPU or largest_run.rows[0][2] == format_bytes(most_needed)
tokens = (largest - smallest) * BATCHES[-1] * SEQ_LEN
a_logit = (forward_bytes(vocabularies[largest, "whole"]) - forward_bytes(vocabularies[smallest, "whole"])) / tokens
assert a_logit >= 8  # the logits in fp32, and their softmax for the backward
assert all(0.95 < trial.ratio < 1.05 for (_, loss), trial in vocabularies.items() if loss == "whole")
assert vocabularies[largest, "chunked"].peak_bytes < vocabularies[largest, "whole"].peak_bytes
assert all(
    abs(one - two) < 1e-3
    for one, two in zip(vocabularies[largest, "whole"].losses, vocabularies[largest, "chunked"].losses, strict=True)
)

# %% tags=["helper"]
RULES = {
    "fp32, or bf16 with fp32 weights": {"parameters": 4, "gradients": 4, "AdamW's two moments": 8},
    "everything in bf16 (bf16_pure)": {"parameters": 2, "gradients": 2, "AdamW's two moments": 4},
    "only to use it, in bf16": {"parameters": 2},
}


def gigabytes(size):
    return f"{size / 1e9:,.1f} GB"


def states(billions, keep):
    rule = RULES[keep]
    rows = [
        (what, size, gigabytes(size * billions * 1e9), format_bytes(size * billions * 1e9))
        for what, size in rule.items()
    ]
    rows.append(
        (
            "all",
            sum(rule.values()),
            *(spell(sum(rule.values()) * billions * 1e9) for spell in (gigabytes, format_bytes)),
        )
    )
    notes = ("1 GB is 10⁹ bytes, as in articles. 1 GiB is 2³⁰ bytes, as CUDA counts: 7% more.",)
    return Table(
        title=f"{billions}B parameters", columns=("what", "bytes each", "in GB", "in GiB"), rows=rows, notes=notes
    )


LLAMA_7B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    vocab_size=32000,
    max_position_embeddings=4096,
)
Path("runs/llama-7b").mkdir(exist_ok=True)
LLAMA_7B.save_pretrained("runs/llama-7b")

# %% [markdown]
# ## Seven billion parameters
#
# The same arithmetic for a model that this machine cannot hold. Many guides say «56 GB for full fine-tuning of a 7B
# model». Find the setting that gives 56, and the one that gives 112.

# %%
tk.vary(states, billions=[1, 3, 7, 13, 34, 70], keep=list(RULES), start={"billions": 7, "keep": next(iter(RULES))})

# %% [markdown]
# The 56 GB keep weights, gradients and moments in bf16. That costs accuracy
# ([05_precision](05_precision.ipynb)). And the table counts states alone. The forecast adds the rest, for
# Llama 2 7B:

# %%
seven = tk.describe("runs/llama-7b")
one_row = tk.TrainConfig(seq_len=2048, micro_batch=1)
controls = ["precision", "devices", "sharding", "seq_len"]
tk.explore("memory", seven, "1x A100-80GB", tk.Strategy(precision="bf16"), one_row, controls=controls)

# %% tags=["check"]
one = tk.forecast(seven, tk.Strategy(precision="bf16"), "A100-80GB", one_row, one_document=True)
pure = tk.forecast(seven, tk.Strategy(precision="bf16_pure"), "A100-80GB", one_row, one_document=True)
assert seven.elements == 6_738_415_616  # what the published weights of Llama 2 7B hold
assert 16 * seven.elements > 80 * GiB  # no A100 holds it
assert not one.fits
assert [size * 7 for size in RULES["everything in bf16 (bf16_pure)"].values()] == [14, 14, 28]
assert pure.parts["parameters"] == 2 * seven.elements
assert pure.parts["optimizer"] == 4 * seven.elements
assert pure.fits
layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
adamw = torch.optim.AdamW(layer.parameters())
layer(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
adamw.step()
moments = adamw.state[layer.weight]
assert (layer.weight.nbytes, layer.weight.grad.nbytes) == (2 * 64 * 64, 2 * 64 * 64)
assert moments["exp_avg"].nbytes + moments["exp_avg_sq"].nbytes == 4 * 64 * 64


# %% tags=["helper"]
def checkpoint_of(run):
    """Bytes of a run's newest checkpoint on disk."""
    newest = sorted((run.folder / "checkpoints").glob("step-*"))[-1]
    return sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())


def checkpoint_sizes(billions):
    rows = [
        ("bf16 weights, fp32 weights, two moments: what many frameworks write", 14, gigabytes(14e9 * billions)),
        ("fp32 weights, two moments: what the toolkit writes", 12, gigabytes(12e9 * billions)),
        ("bf16 weights alone: what is published", 2, gigabytes(2e9 * billions)),
    ]
    return Table(title=f"{billions}B parameters", columns=("saved", "bytes each", "all"), rows=rows)


# %% [markdown]
# ## Its checkpoint
#
# To go on exactly where it stopped, a run needs the weights in fp32 and both moments: 12 bytes a parameter. Gradients
# are computed again. First, the small model's checkpoint is weighed.

# %%
request = {
    "model": data.model,
    "data": data.data,
    "processes": 1,
    "steps": 1,
    "save_every": 1,
    "seq_len": SEQ_LEN,
    "micro_batch": 1,
}
saved = tk.launch("toolkit.finetune", "none", **request, save=False).wait()
print(f"{format_count(P)} parameters: {format_bytes(12 * P)} by the rule, {format_bytes(checkpoint_of(saved))} on disk")

# %% [markdown]
# Now choose a larger model. What frameworks write differs by the 16-bit copy of the weights.

# %%
tk.vary(checkpoint_sizes, billions=[1, 7, 13, 70], start={"billions": 70})

# %% tags=["check"]
assert 1 <= checkpoint_of(saved) / (12 * P) < 1.05
assert one.checkpoint_bytes == 12 * seven.elements
assert [row[2] for row in checkpoint_sizes(70).rows] == ["980.0 GB", "840.0 GB", "140.0 GB"]

# %% tags=["helper"]
STAGES = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}


def zero(parameters, gpus, stage):
    """Bytes of states on one GPU, as the paper counts them."""
    return {
        "parameters": 2 * parameters / (gpus if stage >= 3 else 1),
        "gradients": 2 * parameters / (gpus if stage >= 2 else 1),
        "optimizer": 12 * parameters / (gpus if stage >= 1 else 1),
    }


def zero_figure(gpus, billions):
    found = {name: zero(billions * 1e9, gpus, stage) for name, stage in STAGES.items()}
    rows = [(name, *map(gigabytes, parts.values()), gigabytes(sum(parts.values()))) for name, parts in found.items()]
    picture = bars(
        [Bar(label=name, parts=parts) for name, parts in found.items()],
        title=f"States of {billions}B parameters on each of {gpus} GPUs",
        limit=tk.hardware("A100-80GB").device.total_bytes,
        limit_label="an A100-80GB has",
        spell=gigabytes,
    )
    return figure(picture, Table(columns=("", "parameters", "gradients", "optimizer", "all"), rows=rows))


# %% [markdown]
# ## Shared by many GPUs
#
# If several GPUs train one model, why should each hold all sixteen bytes? ZeRO shares them out: stage 1 the optimizer
# states, stage 2 the gradients too, stage 3 the weights too. This is figure 1 of its paper (Rajbhandari et al. 2020),
# which counts 2 bytes of weights, 2 of gradients and 12 of optimizer. Move the GPUs:

# %%
powers, sizes = [2**power for power in range(11)], [1, 7.5, 13, 70]
tk.vary(zero_figure, gpus=powers, billions=sizes, start={"gpus": GPUS, "billions": 7.5}, title="ZeRO")

# %% tags=["check"]
published = {"DDP": 120, "ZeRO-1": 31.4, "ZeRO-2": 16.6, "ZeRO-3": 1.9}  # GB on 64 GPUs, in the paper
computed = {name: sum(zero(7.5e9, 64, stage).values()) / 1e9 for name, stage in STAGES.items()}
assert max(abs(computed[name] - published[name]) for name in STAGES) < 0.05

# %% [markdown]
# The paper counts states. Engines also gather, copy and keep activations. The forecast has all of it, for the 7B model
# on as many A100 as you like:

# %%
sharded = tk.Strategy(sharding="zero3", precision="bf16")
tk.explore("memory", seven, "8 nodes x 8x A100-80GB", sharded, one_row, controls=["sharding", "devices", "micro_batch"])

# %% tags=["check"]
words = {"DDP": "ddp", "ZeRO-1": "zero1", "ZeRO-2": "zero2", "ZeRO-3": "zero3"}
many = {
    name: tk.forecast(seven, tk.Strategy(sharding=word, precision="bf16"), "8 nodes x 8x A100-80GB", one_row)
    for name, word in words.items()
}
assert [found.fits for found in many.values()] == [False, True, True, True]
assert all(found.peak_bytes > sum(zero(seven.elements, 64, STAGES[name]).values()) for name, found in many.items())
assert len({found.peak_bytes for found in many.values()}) == 4

# %% [markdown]
# ## Gradient accumulation
#
# A batch need not go through the model at once. `accumulation` micro-batches add up their gradients before one step of
# the optimizer: the same batch, the same loss, less memory. Each line below learned from the same rows.


# %%
def splitting(rows):
    return StepProfiles(
        title=f"{BATCHES[-1]} rows at once, and in micro-batches of {rows}",
        trials={f"{each} x {BATCHES[-1] // each}": splits[each] for each in (BATCHES[-1], rows)},
    )


tk.vary(splitting, rows=BATCHES[:-1], start={"rows": BATCHES[0]})

# %% tags=["check"]
whole = splits[BATCHES[-1]]
assert max(abs(a - b) for trial in splits.values() for a, b in zip(whole.losses, trial.losses, strict=True)) < 1e-4
assert {trial.parts["optimizer"] for trial in splits.values()} == {8 * P}
assert forward_bytes(splits[BATCHES[0]]) < forward_bytes(whole)

# %% [markdown]
# ## The rule
#
# **Training takes 16 bytes a parameter, and what the forward keeps of one micro-batch.** If the first number is too
# large, share it (ZeRO-3, FSDP) or train fewer parameters (LoRA). If the second is too large, take fewer rows and
# accumulate, compute the loss in chunks, or recompute activations. Move your model, and the GPUs that share its states:


# %%
def the_rule(parameters, gpus):
    states = f"16 x {format_count(parameters)} = {format_bytes(16 * parameters)}, whatever the batch"
    share = f"{format_bytes(16 * parameters / gpus)} on each of {gpus} GPUs" if gpus > 1 else "on one GPU"
    return f"{states}; {share}. A row of {SEQ_LEN} tokens of this notebook's model adds {row_bytes}."


row_bytes = format_bytes(kept[BATCHES[-1]] / BATCHES[-1])
models = [P, *(billions * 10**9 for billions in (1, 3, 7, 13, 70))]
tk.vary(the_rule, parameters=models, gpus=[1, 2, 4, 8, 16, 64], start={"parameters": P, "gpus": 1})


# %% tags=["helper"]
def cap_ranks(run, size):
    """Let the ranks of a run take so many bytes: a processor has no card that is full. Ends with the run."""

    def watch():
        while run.alive:
            for beat in read_beats(run.folder / "logs").values():
                with contextlib.suppress(psutil.Error, ProcessLookupError, ValueError):
                    process = psutil.Process(beat.pid)
                    if process.rlimit(psutil.RLIMIT_DATA)[0] != size:
                        process.rlimit(psutil.RLIMIT_DATA, (size, size))
            time.sleep(0.1)

    threading.Thread(target=watch, daemon=True).start()


PYTHON = 700 * 2**20  # bytes that Python and its libraries take of a rank's address space

# %% [markdown]
# ## When it goes wrong
#
# You ask for too many rows. The forecast says so before the launch. Find the most that fit:


# %%
def warned(rows):
    return tk.forecast(spec, plain, machine, tk.TrainConfig(seq_len=SEQ_LEN, micro_batch=rows, steps=2))


machine = tk.hardware() if GPU else tk.hardware("1x cpu", host_memory="600MiB")
warning = warned(CRASH_ROWS)
sizes = [CRASH_ROWS // 2**power for power in range(6, -1, -1)]
tk.vary(
    lambda rows: warned(rows).reason, rows=sizes, start={"rows": CRASH_ROWS}, title="Do these rows fit?", ahead=True
)

# %% [markdown]
# You launch all the same. `on_oom="shrink"` is the repair: a rank that runs out of memory is started again with half
# the micro-batch and twice the accumulation, until it fits. The batch that the model learns from stays the same.

# %%
request = {**request, "steps": 2, "save_every": 0, "micro_batch": CRASH_ROWS}
choices = {"on_oom": "shrink", "save": False, "memory_window": False, "precision": "fp32", "loss": "whole"}
survived = tk.launch("toolkit.finetune", "none", **request, **choices)
if not GPU:
    cap_ranks(survived, PYTHON + machine.device.free_bytes // 2)
survived.wait()


# %% tags=["helper"]
def attempts(run):
    record = json.loads((run.folder / "run.json").read_text())
    config = record["train_config"]
    print(f"{run.status} with {config['micro_batch']} rows x {config['accumulation']}, asked for {CRASH_ROWS} x 1")
    return config


# %% [markdown]
# What did it end with?

# %%
settled = attempts(survived)

# %% tags=["check"]
assert not warning.fits
assert survived.status == "finished"
assert settled["micro_batch"] < CRASH_ROWS
assert settled["micro_batch"] * settled["accumulation"] == CRASH_ROWS

# %% [markdown]
# ## Exercises
#
# 1. How many A100-80GB does ZeRO-3 need until the states of 70 billion parameters fit? Use the rule, and half a card
#    for the rest.
# 2. The gradients of a micro-batch of 1 are as large as those of 8. What would make them smaller?
# 3. At which vocabulary are the logits of one row larger than all sixteen bytes of your model?

# %% tags=["solution"]
gpus = 1
while 16 * 70e9 / gpus > tk.hardware("A100-80GB").device.total_bytes / 2:
    gpus += 1
print(f"{gpus} GPUs hold {gigabytes(16 * 70e9 / gpus)} each.")

# %% tags=["solution"]
# There is one gradient for each trained parameter. Fewer trained parameters (LoRA), 2 bytes each (bf16_pure), or a share
# of them on each rank (ZeRO-2 and 3) make them smaller. Accumulation and micro-batches do not.
print(
    f"{format_bytes(first['backward']['gradients'])} for 1 row, {format_bytes(last['backward']['gradients'])} for {BATCHES[-1]}"
)

# %% tags=["solution"]
print(f"At {16 * P / (8 * SEQ_LEN):,.0f} words: {a_logit:.0f} bytes a logit, {SEQ_LEN} tokens.")

# %% [markdown]
# ## Next
#
# You know what takes the memory. [03_load_a_large_model](03_load_a_large_model.ipynb) shows how a model that fits on no
# single device is read, and which choices are made while it loads.
