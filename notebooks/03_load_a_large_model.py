# %% [markdown]
# # Load a large model
#
# `tk.load` makes six choices before a model trains: the attention kernel, the precision, the KV cache, the pad
# token, activation checkpointing, and what a mixture of experts needs. Here each is switched on and off. What it
# costs is **forecast** first, then **measured** in this very kernel: bytes as the allocator counts them, seconds
# by the clock.

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
SEQ_LEN = 512 if GPU else 256
MICRO_BATCH = 4
STEPS = 8 if GPU else 5  # three are measured, those behind them tell the time
LENGTHS = [256, 512, 1024, 2048]
NEW_TOKENS = 128 if GPU else 32

# %% [markdown]
# ## A large model, before a weight is read
#
# A model's config is enough to know its parameters. `tk.describe` builds the modules on torch's *meta* device:
# shapes without memory.

# %%
import time

import torch
from IPython.display import HTML
from transformers import LlamaConfig, MixtralConfig

from toolkit.core.charts import Bar, bars, curve, figure
from toolkit.core.display import Table
from toolkit.core.units import GiB, MiB, format_bytes, format_count
from toolkit.measurement import peak_memory
from toolkit.training.step_profile import StepProfiles

KIND = tk.hardware().device.kind
grouped = {"num_attention_heads": 64, "num_key_value_heads": 8}
llama_70b = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    vocab_size=128256,
    max_position_embeddings=8192,
    **grouped,
)
began = time.perf_counter()
described = tk.describe(llama_70b)
took = time.perf_counter() - began
touched = peak_memory(lambda: tk.describe(llama_70b), KIND)

assert described.elements == 70_553_706_496  # what the published weights of Llama 3 70B hold
assert touched < described.elements / 1000  # of all these parameters next to no byte was allocated
print(f"{format_count(described.elements)} parameters in {took:.1f} s, {format_bytes(touched)} allocated")
described

# %% [markdown]
# ## The model of this notebook
#
# Small enough to train here, and made like one from the Hub: a folder with `config.json`, weights as safetensors
# (random ones) and a tokenizer. With a network, `MODEL = "Qwen/Qwen3-0.6B"` does as well.

# %%
import json
from pathlib import Path

from toolkit.data import embedded_files
from toolkit.training.preflight import random_model

shape = {
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH * 11 // 4,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": WIDTH // 64,
    "num_key_value_heads": WIDTH // 128,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


MODEL = random_model("dense", LlamaConfig(**shape))
spec = tk.describe(MODEL)

# Short documents, so that a row holds several: pieces of Python's own sources.
pieces = [piece for path in embedded_files()[:60] for piece in path.read_text().split("\n\n") if len(piece) > 100]
Path("pieces.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
RECIPE = tk.RunConfig(model=MODEL, data="pieces.jsonl")
LOOP = tk.TrainConfig(seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, steps=STEPS)

print(f"{format_count(spec.elements)} parameters, {len(pieces):,} documents")

# %% [markdown]
# ## One step, forecast and measured
#
# `tk.profile_steps` trains for a few steps in this process. Before it loads a byte it asks `tk.forecast` what will
# happen; the table shows both, and their ratio.

# %%
plain = tk.Strategy(precision="fp32", attention="sdpa", activation_checkpointing="none")
base = tk.profile_steps(plain, LOOP, RECIPE)

assert 0.95 < base.ratio < 1.05
base

# %% [markdown]
# `tk.load` says what it did, a line each:

# %%
for note in base.notes:
    print(note)

assert any("KV cache off" in note for note in base.notes)

# %% [markdown]
# ## Attention backends
#
# The same function, computed in two ways. `eager` writes down the scores of every token with every other, head by
# head: N² numbers a layer, kept for the backward. `sdpa` is torch's `scaled_dot_product_attention`: its kernel
# computes the scores block by block and keeps none. (`flash_attention_2` and `flash_attention_3` do the same in
# kernels of their own; `auto` takes the best that is installed.)

# %%
import dataclasses


def switched(**changes):
    return tk.profile_steps(dataclasses.replace(plain, **changes), LOOP, RECIPE)


attention = {"sdpa": base, "eager": switched(attention="eager")}

assert attention["eager"].phases["forward"] > attention["sdpa"].phases["forward"]
assert all(0.95 < trial.ratio < 1.05 for trial in attention.values())
assert all(
    abs(one - other) < 1e-3 for one, other in zip(attention["sdpa"].losses, attention["eager"].losses, strict=True)
)  # the same function
StepProfiles(title="Attention: sdpa and eager", trials=attention)

# %% [markdown]
# ### O(N²) against O(N)
#
# How the memory of a forward grows with the length N of one sequence. Only what the forward itself keeps counts,
# not the weights.

# %%
import gc


def kept_forecast(kernel, length):
    """Activations and logits of one sequence's forward."""
    asked = dataclasses.replace(plain, attention=kernel)
    found = tk.forecast(
        spec, asked, train_config=tk.TrainConfig(seq_len=length, micro_batch=1), ranks=1, one_document=True
    )
    states = 3 * 4 * spec.elements  # fp32 weights and the two moments of AdamW
    return found.phases["forward"] - states


def kept_measured(kernel, lengths):
    accelerator = tk.accelerator(dataclasses.replace(plain, attention=kernel), tk.TrainConfig(), spec)
    model, _ = tk.load(accelerator)
    model.to(accelerator.device)
    found = []
    for length in lengths:
        ids = torch.ones((1, length), dtype=torch.long, device=accelerator.device)
        found.append(peak_memory(lambda ids=ids: model(input_ids=ids, labels=ids, use_cache=False).loss, KIND))
    return found


forecast, measured = {}, {}
for kernel in ("sdpa", "eager"):
    forecast[kernel] = [kept_forecast(kernel, length) for length in LENGTHS]
    measured[kernel] = kept_measured(kernel, LENGTHS)
    gc.collect()

# %%
rows = [
    (length, *(format_bytes(found[kernel][at]) for kernel in ("sdpa", "eager") for found in (forecast, measured)))
    for at, length in enumerate(LENGTHS)
]
lines = {
    f"{kernel}, {name}": [(length, size / MiB) for length, size in zip(LENGTHS, found[kernel], strict=True)]
    for kernel in ("eager", "sdpa")
    for name, found in (("forecast", forecast), ("measured", measured))
}
HTML(
    figure(
        curve(lines, title="What a forward keeps", x="tokens of the sequence", y="MiB", spell_y="{:,.0f}".format),
        Table(columns=("tokens", "sdpa, forecast", "measured", "eager, forecast", "measured"), rows=rows),
    )
)

# %% [markdown]
# Double the length, and what `sdpa` keeps doubles. What `eager` keeps more is one matrix of scores for each head
# of each layer, 4 bytes × N², and a rest that is linear (keys and values, copied for every head).

# %%
scores = [4 * spec.heads * LAYERS * length**2 for length in LENGTHS]
rest = [eager - sdpa - own for eager, sdpa, own in zip(measured["eager"], measured["sdpa"], scores, strict=True)]

for at, length in enumerate(LENGTHS):
    times = length / LENGTHS[0]
    assert abs(measured["sdpa"][at] / measured["sdpa"][0] / times - 1) < 0.1  # O(N)
    assert abs(rest[at] / rest[0] / times - 1) < 0.1  # and without its scores eager is O(N) too
for kernel in ("sdpa", "eager"):
    assert all(abs(one / other - 1) < 0.1 for one, other in zip(forecast[kernel], measured[kernel], strict=True))
Table(
    columns=("tokens", "sdpa", "+ scores, computed", "+ the rest", "= eager"),
    rows=[
        (length, *map(format_bytes, sizes))
        for length, *sizes in zip(LENGTHS, measured["sdpa"], scores, rest, measured["eager"], strict=True)
    ],
)

# %% [markdown]
# ## bf16
#
# Under `bf16` the forward computes in half the bytes, while trained weights, their gradients and the optimizer
# stay in fp32: activations shrink, states do not. In one process the forward also keeps a bf16 copy of the
# weights (autocast's cache), so it pays off with many tokens. `bf16_pure` keeps everything in bf16: half of the
# states, and updates smaller than about 1/256 of a weight are lost ([05_precision](05_precision.ipynb)). A
# processor without native bf16 saves bytes and takes longer: `auto` chooses bf16 only where it is native. (A GPU
# that does not compute bf16 gets fp16 here.)

# %%
native = tk.hardware().device.dtypes
words = ("bf16", "bf16_pure") if "bf16" in native or not GPU else ("fp16",)
halves = {"fp32": base} | {word: switched(precision=word) for word in words}


def states(trial):
    return trial.parts["parameters"] + trial.parts["optimizer"]


def kept(trial):
    """What the forward keeps beside the states: activations and logits."""
    return trial.phases["forward"] - states(trial)


copies = 2 * spec.elements

for word in words:
    if word == "bf16_pure":
        assert states(halves[word]) == states(base) / 2
        assert kept(halves[word]) < kept(base)
    else:
        assert states(halves[word]) == states(base)
        assert kept(halves[word]) - copies < kept(base)
assert all(0.95 < trial.ratio < 1.05 for trial in halves.values())
StepProfiles(title="Precision", trials=halves)

# %% [markdown]
# ## Activation checkpointing
#
# Keep only what goes into each layer, and compute the rest again in the backward: far fewer bytes for one more
# forward.

# %%
checkpointing = {"none": base, "full": switched(activation_checkpointing="full")}
again = checkpointing["full"].forecast.operations / base.forecast.operations

assert kept(checkpointing["full"]) < kept(base)
assert 1 < again < 4 / 3  # of three parts (forward once, backward twice) the layers' forward comes a second time
assert all(
    abs(one - other) < 1e-5 for one, other in zip(base.losses, checkpointing["full"].losses, strict=True)
)  # the same numbers
print(f"x {again:.2f} operations")
StepProfiles(title="Activation checkpointing", trials=checkpointing)

# %% [markdown]
# ## The KV cache
#
# Generating, a model keeps the keys and values of what it has read, and computes each new token alone. Training
# never reads them again, so `tk.load` turns the cache off. Its size needs no model to know: two tensors a layer,
# a key-value head's width for each token.

# %%
accelerator = tk.accelerator(plain, tk.TrainConfig(), spec)
model, tokenizer = tk.load(accelerator)
model.to(accelerator.device).eval()
prompt = tokenizer(pieces[0], return_tensors="pt", truncation=True, max_length=SEQ_LEN).input_ids.to(accelerator.device)
long = torch.ones((MICRO_BATCH, SEQ_LEN), dtype=torch.long, device=accelerator.device)


def cache_bytes(config, tokens, bytes_of_number=4):
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens * bytes_of_number


def read(use_cache):
    with torch.no_grad():
        return model(input_ids=long, use_cache=use_cache).past_key_values


def generate(use_cache):
    asked = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    began = time.perf_counter()
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), use_cache=use_cache, **asked)
    return time.perf_counter() - began, ids.shape[1] - prompt.shape[1]


expected = cache_bytes(model.config, long.numel())
cache = read(use_cache=True)
held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
begins, ends = prompt.shape[1], prompt.shape[1] + NEW_TOKENS
computed = {True: ends - 1, False: sum(range(begins, ends))}  # tokens that go through the model
a_token = base.seconds / (3 * MICRO_BATCH * SEQ_LEN)  # of a step's three parts one is its forward
timed = {use_cache: generate(use_cache) for use_cache in (True, False)}

assert model.config.use_cache is False  # as tk.load left it
assert read(use_cache=False) is None
assert held == expected
assert all(count == NEW_TOKENS for _, count in timed.values())
assert computed[False] > computed[True]
Table(
    title=f"Reading {long.numel():,} tokens; writing {NEW_TOKENS} behind {begins}",
    columns=("KV cache", "bytes, forecast", "measured", "tokens computed", "seconds, forecast", "measured"),
    rows=[
        (
            "on" if use_cache else "off",
            *(map(format_bytes, (expected, held)) if use_cache else ("0 B", "0 B")),
            f"{computed[use_cache]:,}",
            f"{computed[use_cache] * a_token:.2f}",
            f"{took:.2f}",
        )
        for use_cache, (took, _) in timed.items()
    ],
    notes=(
        "Seconds are forecast by operations, at a training step's speed; token by token a small model waits for its calls.",
    ),
)

# %% [markdown]
# ## The pad token
#
# Rows of a batch are equally long, so something has to fill the short ones. Many tokenizers come without a pad
# token, and the usual remedies cost: a new token makes the vocabulary one larger (a row in the embedding and one
# in the head, with gradients and moments), and padding with the token that ends a text hides that token from the
# loss. `tk.load` takes the tokenizer's own, else one that is named after padding or kept in reserve, and only
# then the end of a text. No weight is added.

# %%
from transformers import AutoTokenizer

bare = AutoTokenizer.from_pretrained(MODEL)
bare.pad_token = None
try:
    bare(["short", "a longer text"], padding=True)
    refused = None
except ValueError as error:
    refused = str(error)

larger = tk.describe(LlamaConfig(**{**shape, "vocab_size": shape["vocab_size"] + 1}))
cost = 16 * (larger.elements - spec.elements)  # fp32 weight, gradient, two moments

assert refused is not None
assert tokenizer.pad_token_id is not None
assert tokenizer.pad_token != tokenizer.eos_token
assert model.get_input_embeddings().num_embeddings == spec.vocab
assert cost == 16 * 2 * WIDTH
print(f"Without one: {refused}\n")
print(f"tk.load pads with {tokenizer.pad_token!r}, no weight added; one more token would take {format_bytes(cost)}.")

# %% [markdown]
# Better than padding is not to pad. Where the model keeps documents apart, rows are **packed**: several documents
# a row, none sees another. Padded rows hold as many bytes and take as long; they only train less.

# %%
padding = {"packed": base, "padded": tk.profile_steps(plain, LOOP, dataclasses.replace(RECIPE, packing=False))}
asked = MICRO_BATCH * SEQ_LEN
trained = {name: sum(step.tokens for step in trial.steps) / STEPS / asked for name, trial in padding.items()}

assert trained["packed"] > trained["padded"]
assert abs(padding["padded"].peak_bytes / base.peak_bytes - 1) < 0.05
for name, share in trained.items():
    print(
        f"{name}: {share:.0%} of {asked:,} tokens a step are trained, {asked * share / padding[name].seconds:,.0f} a second"
    )
StepProfiles(title="Packed and padded rows", trials=padding)

# %% [markdown]
# ## A mixture of experts
#
# A token passes through only a few of the experts, but all of them are held, with gradients and moments.
# `tk.describe` finds experts by looking at the modules, not at a model's name. What follows from it: operations
# are counted for the active ones, LoRA and quantization know which weights are fused, and under ZeRO-3 the block
# is gathered whole, because ranks that route to different experts would otherwise wait for each other without end. Off is
# the dense model, as wide as the experts that are active.

# %%

EXPERTS, ACTIVE = 8, 2
narrow = {**shape, "intermediate_size": WIDTH}
routed = MixtralConfig(**narrow, num_local_experts=EXPERTS, num_experts_per_tok=ACTIVE, sliding_window=None)
dense = LlamaConfig(**{**narrow, "intermediate_size": ACTIVE * WIDTH})
folders = {"dense": random_model("as_wide", dense), "experts": random_model("experts", routed)}
experts = {
    name: tk.profile_steps(plain, LOOP, dataclasses.replace(RECIPE, model=folder)) for name, folder in folders.items()
}
specs = {name: tk.describe(folder) for name, folder in folders.items()}

assert specs["dense"].moe is None
assert (specs["experts"].moe.experts, specs["experts"].moe.active) == (EXPERTS, ACTIVE)
assert abs(specs["experts"].active_elements / specs["dense"].elements - 1) < 0.01  # as many are active
assert states(experts["experts"]) == 12 * specs["experts"].elements  # and all are held
assert 0.9 < experts["experts"].ratio < 1.1
print(f"{specs['experts'].moe.block}: {format_count(specs['experts'].elements)} parameters, "
      f"{format_count(specs['experts'].active_elements)} active")  # fmt: skip
StepProfiles(title="A dense model, and experts of which as much is active", trials=experts)

# %% [markdown]
# ## The same choices at 8 billion parameters
#
# This is a forecast alone: nothing of it runs here. Llama 3 8B on eight H100 under ZeRO-3, two sequences of 8,192
# tokens each, and one choice after the other taken back.

# %%

llama_8b = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
)
eight = tk.describe(llama_8b)
chosen = tk.Strategy(sharding="zero3", precision="bf16", attention="sdpa", activation_checkpointing="full")
taken_back = {
    "as tk.load sets it": {},
    "attention eager": {"attention": "eager"},
    "precision fp32": {"precision": "fp32"},
    "no checkpointing": {"activation_checkpointing": "none"},
}
step = tk.TrainConfig(seq_len=8192, micro_batch=2)
forecasts = {
    name: tk.forecast(eight, dataclasses.replace(chosen, **changes), "8x H100-80GB", step)
    for name, changes in taken_back.items()
}
first, *others = forecasts.values()

assert eight.elements == 8_030_261_248  # what the published weights hold
assert first.fits
assert all(other.peak_bytes > first.peak_bytes for other in others)
assert not forecasts["no checkpointing"].fits
rows = [
    (name, format_bytes(found.peak_bytes), "yes" if found.fits else "no", f"{found.timing.step_seconds:.1f} s")
    for name, found in forecasts.items()
]
HTML(
    figure(
        bars(
            [Bar(label=name, parts=found.parts) for name, found in forecasts.items()],
            title="Llama 3 8B, ZeRO-3 on eight H100: the fullest rank, forecast",
            limit=first.limit_bytes,
            limit_label="an H100 has",
        ),
        Table(columns=("choice", "peak", "fits", "a step"), rows=rows),
    )
)

# %% [markdown]
# And the KV cache of one of these sequences, had it been left on:

# %%
llama_8b_cache = cache_bytes(llama_8b, 8192, bytes_of_number=2)

assert llama_8b_cache == GiB
print(f"{format_bytes(llama_8b_cache)} for 8,192 tokens in bf16")

# %% [markdown]
# ## Exercises
#
# 1. Double `MICRO_BATCH`. Which of the parts of the first picture grow, and which do not? Say it before you run
#    it.
# 2. At which length does `eager` keep twice as much as `sdpa`? Read it off the curve, then compute it from
#    `WIDTH` and the number of heads.
# 3. `tk.Strategy(precision="fp16")` is refused on a processor. Read the sentence, and do what it says.
# 4. Give `random_model` a `LlamaConfig` with `tie_word_embeddings=True`. What does `tk.describe` say of it, and how
#    many    bytes does it save?
# 5. Which micro-batch still fits on one H100 with all choices as `tk.load` makes them? Ask `tk.forecast`, then
#    `tk.plan`.
