# %% [markdown]
# # Your first run
#
# You have a machine, a text and a model. How do you train, watch, stop and resume a run? And will the model that you
# really want fit on your card?

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
    wanted = "accelerate-toolkit[notebook]"  # or the path of a wheel
    tested = "accelerate==1.15.0 transformers==5.23.0 peft==0.21.2"
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
# - **You know** Python, and roughly what «training a neural network» means.
# - **You can then** launch a run and read its numbers, stop and resume it, repair a crash, and ask for a plan.
# - **Time** about 4 minutes on two processor cores.
# - **Hardware** any. A processor is enough; below, the forecast says what the run takes on a T4 and an L4.
#
# This is where you are:

# %%
import toolkit as tk

tk.environment()

# %% [markdown]
# Change these values and run everything again. Each run gets a new folder in `runs/`.

# %% tags=["parameters"]
GPU = tk.hardware().device.kind == "cuda"
RANKS = tk.hardware().ranks if GPU else 2  # processes that train together
CARD = "T4"  # the card that you have, or want to rent
STEPS = 80
SEQ_LEN = 128  # tokens in a row
MICRO_BATCH = 4  # rows that a rank reads at once
LR = 3e-3  # high, since this model begins at random weights; 2e-5 for a trained one

# %% tags=["helper"]
import math
import os
import signal
import time
from pathlib import Path
from pydoc_data.topics import topics

from IPython.display import Markdown
from transformers import LlamaConfig

from toolkit.core.charts import curve
from toolkit.core.display import Table
from toolkit.core.units import format_bytes, format_seconds
from toolkit.run_folder.heartbeat import read_beats

# A text: the language reference of Python. And a model that is described by its config alone: Llama 3.2 1B.
Path("runs/llama-1b").mkdir(parents=True, exist_ok=True)
Path("runs/reference.txt").write_text("\n\n".join(topics.values()), encoding="utf-8")
LlamaConfig(
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
).save_pretrained("runs/llama-1b")


def wait_for(run, step):
    """Wait until a run has done a step, or has ended."""
    while run.alive and run.progress.step < step:
        time.sleep(0.2)


def kill_rank(run, rank):
    """End a rank's process, as a system does that is short of memory, and return what the run says of it."""
    os.kill(read_beats(run.folder / "logs")[rank].pid, signal.SIGKILL)
    while run.alive:
        time.sleep(0.2)
    return run.message


# %% [markdown]
# ## Will it fit?
#
# The toolkit brings a small Llama of 5 million parameters. Each parameter is a number of 4 bytes, 19 MiB in all.
#
# **Your guess:** how much memory does a process need to *train* it? Twice the 19 MiB, four times, seven times?
#
# The forecast answers before anything runs. A process that trains is a **rank**; `micro_batch` is the number of rows
# that a rank reads at once. `strategy` and `settings` are those of the run below: no other setting is forecast. Move
# the device and the rows. (`ahead=True` computes all answers first.)

# %%
strategy = tk.Strategy(sharding="ddp", activation_checkpointing="none", loss="chunked")
settings = {"seq_len": SEQ_LEN, "steps": STEPS, "lr": LR}


def need(device, rows):
    machine = None if device == "this machine" else f"{RANKS}x {device}"
    return tk.forecast(tk.describe(), strategy, machine, tk.TrainConfig(micro_batch=rows, **settings), ranks=RANKS)


choices = {"device": ["this machine", "T4", "L4"], "rows": sorted({1, 2, 4, 8, 16, 32, MICRO_BATCH})}
start = {"device": "this machine", "rows": MICRO_BATCH}
tk.vary(need, **choices, start=start, ahead=True, title="What this notebook's runs need")

# %% tags=["check"]
first = need("this machine", MICRO_BATCH)
weights = 4 * tk.describe().elements
assert first.fits
assert first.parts["parameters"] == weights
assert first.parts["optimizer"] == 2 * weights  # the optimizer keeps two more numbers for each parameter
assert 4 * weights < first.peak_bytes

# %% [markdown]
# Beside the weights there are gradients, two numbers of the optimizer for each weight, and what the forward pass
# keeps for the backward pass. [02_where_the_memory_goes](02_where_the_memory_goes.ipynb) looks at each.
#
# ## Train, and watch
#
# `tk.launch` starts the ranks and returns at once. `ddp` is the simplest way to share work: every rank has a whole
# model, reads its own rows, and the gradients are averaged. The view below follows the run while you go on working;
# its buttons stop the run, and make the axis of the loss logarithmic.

# %%
request = {"data": "runs/reference.txt", "processes": RANKS, "micro_batch": MICRO_BATCH, **settings}
run = tk.launch("toolkit.finetune", strategy, **request)
run

# %% [markdown]
# ## Stop it, and resume it
#
# The button above and `run.stop()` do the same: the ranks end their step, write a **checkpoint**, and leave. Here a
# third of the steps is enough.

# %%
wait_for(run, STEPS // 3)
run.stop()

# %% tags=["check"]
assert run.status == "stopped"
stopped_at = run.progress.step
assert STEPS // 3 <= stopped_at < STEPS

# %% [markdown]
# A checkpoint holds the weights, the optimizer, the place in the data and the random numbers. So the run goes on as
# if nothing had happened.

# %%
run = tk.resume(run.folder)
run.wait()
run.metrics[["step", "loss", "tokens", "seconds", "attempt"]].tail(4)

# %% tags=["check"]
steps = run.metrics
assert run.status == "finished"
assert list(steps["step"]) == list(range(1, STEPS + 1))  # no step is missing, and none is done twice
assert set(steps["attempt"]) == {0, 1}
assert STEPS < 20 or steps["loss"].iloc[-1] < steps["loss"].iloc[0]

# %% [markdown]
# On a logarithmic axis you see whether the loss still falls. `tk.compare_runs` takes several runs, too:


# %%
def loss_curve(axis):
    return tk.compare_runs([run], log=axis == "logarithmic")


tk.vary(loss_curve, axis=["linear", "logarithmic"], start={"axis": "linear"}, title="The whole run")

# %% [markdown]
# ## Hear it
#
# The trained model lies in the run's folder as plain Hugging Face files. After so few steps it knows frequent words,
# and no sentence yet. The temperature says how often it takes a less likely word:

# %%
asked = {"max_new_tokens": 40, "stream": False}
answers = {heat: str(tk.generate(run.folder, "The ", temperature=heat, **asked)) for heat in (0.2, 0.7, 1.5)}
tk.vary(lambda temperature: f"The {answers[temperature]}", temperature=list(answers), title="What it writes")

# %% [markdown]
# ## Was the forecast right?
#
# The report has the request, the audit, the losses, and the memory as it was forecast and measured. Its forecast is
# that of the first panel. So the ratio in the table of phases is how far you can trust that panel.

# %%
run.report()

# %% [markdown]
# The same beside a forecast that you can move. With other rows than the run had, the panel says so:

# %%
tk.explore("timeline", run=run, controls=["micro_batch", "activation_checkpointing"])

# %% tags=["check"]
measured = run.memory["measured"]["peak_bytes"]
assert all(answers.values())
# The panel forecast this very run, but for whether a row holds several documents: the data and the steps decide.
step = tk.TrainConfig(micro_batch=MICRO_BATCH, **settings)
alone = tk.forecast(tk.describe(), strategy, None, step, ranks=RANKS, one_document=True)
assert run.memory["forecast"]["device"]["peak_bytes"] in (first.peak_bytes, alone.peak_bytes)
assert abs(first.peak_bytes / measured - 1) < 0.1

# %% [markdown]
# ## The model that you want, on your card
#
# Llama 3.2 1B has 1.2 billion parameters. Its `config.json` is enough for a forecast; no weight is read. Choose your
# device and the number of them. `zero3` divides the model over the ranks instead of copying it.

# %%
large = tk.describe("runs/llama-1b")
length = tk.TrainConfig(seq_len=4096)
tk.explore(
    "memory", large, f"1x {CARD}", tk.Strategy(), length, controls=["device", "devices", "sharding", "micro_batch"]
)

# %% [markdown]
# ## Ask for a plan
#
# You need not try them all. `tk.plan` forecasts every way to share the model, every micro-batch, and whether to
# recompute activations. It ranks what fits, the fastest first. Compare the first row with the rows that need much
# less memory: speed and memory are a trade. A plan takes a second or two, so all four are made first.

# %%
machines = ["4x L4", "8x RTX-4090", "8x A100-40GB", "8x H100-80GB"]
plans = {machine: tk.plan(large, machine, global_batch=64, seq_len=4096) for machine in machines}
start = {"machine": "8x RTX-4090"}
tk.vary(lambda machine: plans[machine], machine=machines, start=start, title="The plan for a machine")

# %% tags=["check"]
ranked = plans["8x RTX-4090"].ranked
speeds = [one.forecast.timing.tokens_per_second for one in ranked]
needs = [one.forecast.needed_bytes for one in ranked]
assert speeds[0] == max(speeds)
assert needs[0] > 1.5 * min(needs)  # the fastest is not the one that needs least

# %% [markdown]
# ## Let your run correct the plan
#
# The catalog knows GPUs. It knows no speed of your processor, or of a card that it has not seen: there the plan can
# only be sorted by memory. One run is enough to learn the speed. `calibrate` puts it into every forecast:

# %%
one_step = tk.TrainConfig(**settings)
here = tk.plan(tk.describe(), f"{RANKS}x cpu" if not GPU else None, global_batch=4 * RANKS, train_config=one_step)
learned = [(one, one.forecast.calibrate(run.folder)) for one in here.ranked]


def sorted_by(what):
    by_time = sorted(learned, key=lambda pair: pair[1].timing.step_seconds)
    return ranking(by_time if what == "time, learned from the run" else learned)


# %% tags=["helper"]
def ranking(pairs):
    rows = [
        (
            one.strategy.sharding,
            one.strategy.activation_checkpointing,
            f"{one.train_config.micro_batch} x {one.train_config.accumulation}",
            format_bytes(found.peak_bytes),
            f"{found.timing.step_seconds:.3f}",  # the rows differ by milliseconds
        )
        for one, found in pairs[:6]
    ]
    columns = ("sharding", "recompute", "batch", "peak", "seconds of a step")
    return Table(title="The first six", columns=columns, rows=rows)


# %% [markdown]
# Move the order. On a processor the first row changes: what needs least memory recomputes, and takes longer. The
# seconds are the run's speed times each row's operations, without communication: right for the order, not to the
# second.

# %%
tk.vary(sorted_by, what=["memory", "time, learned from the run"])

# %% tags=["check"]
by_memory, by_time = sorted_by("memory").rows, sorted_by("time, learned from the run").rows
assert GPU or by_memory[0] != by_time[0]
assert GPU or {"full", "none"} == {by_memory[0][1], by_time[0][1]}
assert GPU or float(by_time[0][4]) < float(by_memory[0][4])  # and the table shows it

# %% [markdown]
# ## The rule
#
# **Save every √(2 · C · F) seconds**, where C is the time that a checkpoint costs you and F the time between two
# failures (Young 1974). More often, and you wait for the disk; less often, and a crash costs you more. Move both. The
# toolkit's own default, `save_seconds=1800`, is right for a failure every few days.


# %%
def lost(checkpoint_seconds, hours_between_failures):
    failures = 3600 * hours_between_failures
    best = math.sqrt(2 * checkpoint_seconds * failures)
    intervals = [best * 2 ** (power / 4) for power in range(-12, 13)]
    shares = [(each / 60, 100 * (checkpoint_seconds / each + each / 2 / failures)) for each in intervals]
    return curve({"lost": shares}, title=f"Save every {format_seconds(best)}", x="minutes between", y="% of the time")


tk.vary(lost, checkpoint_seconds=[0.1, 1, 10, 60, 300], hours_between_failures=[1, 6, 24, 72, 240])

# %% [markdown]
# ## When it goes wrong
#
# A rank is killed: by a system short of memory, by a scheduler, by you. The others cannot go on without it. Here we
# kill rank 1 ourselves, in a run that saves a checkpoint every few steps.

# %%
crashed = tk.launch("toolkit.finetune", strategy, **{**request, "steps": 8}, save_every=3)
wait_for(crashed, 4)
message = kill_rank(crashed, RANKS - 1)
Markdown(message)

# %% [markdown]
# The message names the rank and the signal, and the command that continues. Steps after the last checkpoint are done
# again, with the same rows. (`restarts=3` in `tk.launch` does this for you.)

# %%
repaired = tk.resume(crashed.folder)
repaired.wait()
repaired.metrics[["step", "loss", "attempt"]]

# %% [markdown]
# How many steps are done again? Move when the rank is killed, and how often the run saves:


# %%
def done_again(killed_in_step, save_every):
    return f"{(killed_in_step - 1) % save_every} steps are done again, and the one that was killed."


tk.vary(done_again, killed_in_step=range(1, 41), save_every=[1, 3, 5, 10, 20], start={"killed_in_step": 5})

# %% tags=["check"]
assert f"rank {RANKS - 1}" in message
assert "SIGKILL" in message
assert repaired.status == "finished"
assert list(repaired.metrics["step"]) == list(range(1, 9))
assert set(repaired.metrics["attempt"]) == {0, 1}

# %% [markdown]
# ## Exercises
#
# 1. All your runs lie in `runs/`. List them, and find yours again after a restart of the kernel.
# 2. How many rows can a T4 read at once before the small model no longer fits?
# 3. Which precision did your run compute in, and why?

# %% tags=["solution"]
tk.runs()  # tk.attach(folder) shows one again

# %% tags=["solution"]
rows = 1
while need("T4", 2 * rows).fits:
    rows *= 2
print(f"{rows:,} rows of {SEQ_LEN} tokens fit, {2 * rows:,} do not.")

# %% tags=["solution"]
# `auto` takes bf16 where the device computes it natively, fp16 on other GPUs, and fp32 on a processor without bf16.
print(
    f"The run computed in {run.strategy.precision}; this device computes natively in {', '.join(tk.hardware().device.dtypes)}."
)

# %% [markdown]
# ## Next
#
# You saw that training takes many times the model's own size.
# [02_where_the_memory_goes](02_where_the_memory_goes.ipynb) takes it apart.
