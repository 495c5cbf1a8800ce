# %% [markdown]
# # Plan and launch: from a question to a report
#
# How do I train *this* model on *that* machine? This notebook asks for a plan, writes it down as an Accelerate
# config file, launches it, watches it, reads the report, lets the run correct the forecast, and does the same once
# more by hand.

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
MODEL = "my-model"  # yours: a folder, or a Hub id. This folder is made below where it is not there
DATA = "my-text.txt"  # yours: text, JSONL, a folder, or a Hub data set. This file is made below where it is not there
RANKS = tk.hardware().ranks if GPU else 2  # processes
GLOBAL_BATCH = 4 * RANKS  # rows of a step, over all ranks
SEQ_LEN = 1024 if GPU else 128
STEPS = 20
BY_HAND = True  # run the command in a shell as well, at the end
LR = 1e-3  # that of a model which begins at nothing; 2e-5 for one that knows something

# %% [markdown]
# ## Your model, your data
#
# Name your own above. So that the notebook runs anywhere, a small Llama of random weights and a text are made here:
# Python's language reference, as `help()` shows it.

# %%
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from toolkit.data import embedded_tokenizer

# What libraries would say between the cells.
logging.disable_progress_bar()
if not GPU:
    os.environ["DS_ACCELERATOR"] = "cpu"  # else DeepSpeed warns that it finds no other

if MODEL == "my-model" and not Path(MODEL).exists():
    embedded_tokenizer(Path(MODEL))
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(MODEL)
if DATA == "my-text.txt" and not Path(DATA).exists():
    from pydoc_data.topics import topics

    Path(DATA).write_text("\n\n".join(topics.values()), encoding="utf-8")

# %%
spec = tk.describe(MODEL)
spec

# %% [markdown]
# ## Ask for a plan
#
# `tk.plan` goes through every sharding, offload, micro-batch and activation checkpointing, forecasts each, and
# ranks what fits with 5% to spare. It launches nothing and reads no weights. The question names the machine and the
# **global batch**: how many rows one step learns from.

# %%
machine = tk.hardware(None if GPU else f"{RANKS}x cpu")
train_config = tk.TrainConfig(seq_len=SEQ_LEN, steps=STEPS, lr=LR)
plan = tk.plan(spec, machine, global_batch=GLOBAL_BATCH, train_config=train_config)
f"{len(plan.ranked)} that fit, {len(plan.rejected)} that do not"

# %% [markdown]
# `plan` alone shows the ten best and the reasons of the others; `tk.plan(…, whole=True)` shows every candidate. Here
# are the first ten, and the first of each sharding by what it holds at its peak:

# %%
import dataclasses

from IPython.display import HTML

from toolkit.core.charts import Bar, bars
from toolkit.core.display import Table
from toolkit.core.units import format_bytes, format_seconds

ranked = plan.tables()[0]
HTML(dataclasses.replace(ranked, rows=list(ranked.rows)[:10]).html())

# %%
firsts = {one.strategy.sharding: one.forecast.parts for one in reversed(plan.ranked)}
HTML(
    bars([Bar(label=word, parts=firsts[word]) for word in sorted(firsts)], title="Forecast: the first of each sharding")
)

# %% [markdown]
# On a GPU of the catalog the fastest comes first. How fast a CPU is nobody knows yet, so there the least memory
# comes first; a run will tell, below.
#
# **Why the others are rejected** stands in their reasons. There are two kinds: what an engine cannot do on this
# machine, whatever its size, …

# %%
impossible = {one.reason for one in plan.rejected if one.forecast is None}
for reason in sorted(impossible):
    print("-", reason)

# %% [markdown]
# … and what needs more memory than there is. Here is the same question for a machine of which so much is in use
# that half of the plan is out:

# %%
peaks = sorted(one.forecast.peak_bytes for one in plan.ranked)
free = peaks[len(peaks) // 2]  # of a rank
taken = (plan.best.forecast.limit_bytes - free) * machine.ranks
tight = dataclasses.replace(machine, host_free_bytes=machine.host_free_bytes - taken)
if GPU:
    tight = dataclasses.replace(machine, device=dataclasses.replace(machine.device, free_bytes=free))
smaller = tk.plan(spec, tight, global_batch=GLOBAL_BATCH, train_config=train_config)
too_large = [one for one in smaller.rejected if one.forecast is not None]
for one in too_large[:4]:
    print(f"- {one.strategy.sharding}, micro-batch {one.train_config.micro_batch}: {one.reason}")

# %% [markdown]
# Nothing is hidden: every candidate is ranked, or rejected with a reason; what is ranked fits with 5% to spare, and
# what is too large does not. Once a micro-batch is too large, larger ones are not asked for.

# %%
assert all(one.reason for one in plan.rejected)
assert not any(one.reason for one in plan.ranked)
assert all(one.forecast.peak_bytes <= 0.95 * one.forecast.limit_bytes for one in (*plan.ranked, *smaller.ranked))
assert too_large
assert all(one.forecast.peak_bytes > 0.95 * free for one in too_large)
assert len(smaller.ranked) < len(plan.ranked)

# %% [markdown]
# ## Write it down
#
# `plan.best` is a strategy with its batch; `plan.config()` the Accelerate config file that says the same to any
# script that `accelerate launch` starts. What does not belong in that file (the batch, activation checkpointing,
# lengths) goes into the command as flags.

# %%
import yaml

Path("accelerate.yaml").write_text(yaml.safe_dump(plan.config(), sort_keys=False))
command = plan.command(MODEL).replace("YOUR_DATA", DATA)
print(Path("accelerate.yaml").read_text())
print(command)

# %%
assert plan.config()["num_processes"] == machine.ranks
best = plan.best
assert (best.train_config.micro_batch * best.train_config.accumulation * machine.ranks, best.train_config.seq_len) == (
    GLOBAL_BATCH,
    SEQ_LEN,
)

# %% [markdown]
# ## Launch, and watch
#
# `tk.launch` starts the ranks by `accelerate launch` and comes back at once. The run shows itself while it goes on;
# the kernel is free, and a closed tab does no harm: `tk.attach(run.folder)` shows it again. `run.stop()` would end
# it after its step, with a checkpoint.

# %%
run = tk.launch("toolkit.finetune", plan.best, processes=machine.ranks, model=MODEL, data=DATA, run_dir="runs/planned")
run

# %%
run.wait()
metrics = run.metrics
metrics[["step", "loss", "grad_norm", "lr", "tokens", "seconds"]].tail()

# %%
assert run.status == "finished"
assert len(metrics) == STEPS
assert STEPS < 10 or metrics["loss"].iloc[-1] < metrics["loss"].iloc[0]
assert run.strategy == best.strategy  # what ran is what was planned
assert yaml.safe_load((run.folder / "accelerate.yaml").read_text()) == plan.config()  # and the file it ran with is ours

# %% [markdown]
# ## Read the report
#
# The request, the audit, forecast and measurement, the losses. `report.html` in the run's folder is the same
# as one page that asks nothing of the network, to be kept or sent.

# %%
run.report()

# %%
page = run.report().write()
assert page == run.folder / "report.html"
assert not any(word in page.read_text() for word in ("<script", 'src="http', 'href="http', "@import"))

# %% [markdown]
# How true was the forecast? The highest need of the fullest rank, as it was planned, and as the allocator counted
# it:

# %%
from toolkit.core.phases import PHASES

measured = run.memory["measured"]
phases = {
    phase: (best.forecast.phases[phase], measured["phases"][phase]) for phase in PHASES if phase in measured["phases"]
}
phases["peak"] = best.forecast.peak_bytes, measured["peak_bytes"]
rows = [(phase, format_bytes(one), format_bytes(two), f"{one / two:.3f}") for phase, (one, two) in phases.items()]
HTML(Table(title="A rank's memory", columns=("phase", "planned", "measured", "ratio"), rows=rows).html())

# %%
assert abs(best.forecast.peak_bytes / measured["peak_bytes"] - 1) < 0.05

# %% [markdown]
# ## Let the run correct the forecast
#
# One run teaches what no plan knows: how fast this machine is, and what a rank takes beside the traced bytes.
# `calibrate` puts that into any forecast on the same kind of device. Here it turns the plan's order by memory into
# one by time:

# %%
learned = [(one, one.forecast.calibrate(run.folder)) for one in plan.ranked]
learned.sort(key=lambda pair: pair[1].timing.step_seconds)
rows = [
    (
        one.strategy.sharding,
        one.strategy.activation_checkpointing,
        one.train_config.micro_batch,
        format_bytes(found.peak_bytes),
        format_seconds(found.timing.step_seconds),
        f"{found.timing.tokens_per_second:,.0f}",
    )
    for one, found in learned[:8]
]
columns = ("sharding", "checkpointing", "micro-batch", "peak", "a step", "tokens/s")
HTML(Table(title="The plan, corrected by one run", columns=columns, rows=rows).html())

# %% [markdown]
# (Time is scaled by a strategy's operations alone: what its communication takes in addition, only a run of its own
# tells.) For what ran, the corrected forecast says what was measured:

# %%
calibrated = best.forecast.calibrate(run.folder)
assert calibrated.peak_bytes == measured["peak_bytes"]
taken = metrics["seconds"][3:] if STEPS > 3 else metrics["seconds"]  # memory is measured in the first three
assert abs(calibrated.timing.step_seconds / taken.median() - 1) < 1e-6
one = calibrated.timing.step_seconds
f"a step takes {one:.2f} s, and a thousand of them {format_seconds(1000 * one)}"

# %% [markdown]
# ## The same by hand
#
# Nothing of this needs a notebook. The command from above, as a shell runs it; `tk.attach` then shows what any
# run's folder holds.

# %%
import shlex

if BY_HAND:
    words = [*shlex.split(command), "--run-dir", "runs/by-hand"]
    with open("by-hand.log", "w") as log:
        subprocess.run(
            [sys.executable, "-m", "accelerate.commands.accelerate_cli", *words[1:]], check=True, stdout=log, stderr=log
        )
    again = tk.attach("runs/by-hand").metrics
    assert all(abs(one / two - 1) < 1e-5 for one, two in zip(again["loss"], metrics["loss"], strict=True))
    print(f"{len(again)} steps, the same losses: {again['loss'].iloc[0]:.4f} … {again['loss'].iloc[-1]:.4f}")

# %%
tk.runs()

# %% [markdown]
# ## Take it along
#
# The trained model is a folder that plain transformers opens.

# %%
from transformers import AutoTokenizer

trained = AutoModelForCausalLM.from_pretrained(run.folder / "export")
tokenizer = AutoTokenizer.from_pretrained(run.folder / "export")
prompt = tokenizer("The ", return_tensors="pt")
made = trained.generate(**prompt, max_new_tokens=20, do_sample=False)
assert made.shape[1] > prompt["input_ids"].shape[1]
print(tokenizer.decode(made[0]))

# %% [markdown]
# ## Exercises
#
# 1. Put a text of your own in the place of `DATA`, and a model of yours in the place of `MODEL`. Ask for the plan
#    again before you run anything.
# 2. `tk.plan(spec, "8x H100-80GB", global_batch=64)` plans for a machine that you do not have. Which strategy comes
#    first, and why is it not the one with the least memory?
# 3. Launch the second of the corrected plan. Is its step as long as was said? What was left out?
# 4. Launch with `steps=1000`, call `run.stop()` while it goes on, and then `tk.resume(run.folder)`. From which step
#    does it go on?
# 5. Restart the kernel while a run goes on, and find it again with `tk.runs()` and `tk.attach`.
