# %% [markdown]
# # Load a large model
#
# A model of 70 billion parameters is larger than any card. Who reads which part of it, on which hardware, and which
# choices are made before the first step?

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
# - **You know** the parts of the memory ([02_where_the_memory_goes](02_where_the_memory_goes.ipynb)).
# - **You can then** tell how many ranks a model needs to be read, choose attention, cache and padding, compare cards, and
#   see in a preview what a chat template trains.
# - **Time** about 3 minutes on two processor cores.
# - **Hardware** a processor is enough: the large models are described and forecast, and a small one is measured. A
#   forecast below says what that takes.

# %%
import toolkit as tk

tk.environment()

# %% [markdown]
# Change these values and run everything again.

# %% tags=["parameters"]
GPU = tk.hardware().device.kind == "cuda"
WIDTH = 1024 if GPU else 256  # hidden size: 0.15B parameters on a GPU, 5M on a processor
LAYERS = 12 if GPU else 4
SEQ_LEN = 512 if GPU else 256
MICRO_BATCH = 4
STEPS = 8 if GPU else 4  # three are measured, those behind them tell the time
LENGTHS = [256, 512, 1024, 2048]
NEW_TOKENS = 128 if GPU else 32

# %% tags=["helper"]
import dataclasses
import gc
import json
import os
import statistics
import time
from pathlib import Path

import numpy
import torch
from transformers import LlamaConfig, MixtralConfig

from toolkit.core.charts import Bar, bars, curve, figure
from toolkit.core.display import Table
from toolkit.core.errors import ToolkitError
from toolkit.core.units import GiB, MiB, format_bytes
from toolkit.data import embedded_files
from toolkit.devices.gpu_catalog import CARDS
from toolkit.measurement import peak_memory
from toolkit.training.preflight import random_model
from toolkit.training.step_profile import StepProfiles

Path("runs").mkdir(exist_ok=True)
KIND = tk.hardware().device.kind
grouped = {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
LLAMAS = {
    "8B": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        **{**grouped, "num_attention_heads": 32},
    ),
    "70B": LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, **grouped),
    "405B": LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        **{**grouped, "num_attention_heads": 128},
    ),
}
for size, config in LLAMAS.items():
    config.save_pretrained(f"runs/llama-{size}")

SHAPE = {
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
EXPERTS, ACTIVE = 8, 2
narrow = {**SHAPE, "intermediate_size": WIDTH}
experts = {"num_local_experts": EXPERTS, "num_experts_per_tok": ACTIVE, "sliding_window": None}
SMALL = {
    name: random_model(f"runs/{name}-{WIDTH}x{LAYERS}", config)
    for name, config in {
        "dense": LlamaConfig(**SHAPE),
        "as wide as the active experts": LlamaConfig(**{**narrow, "intermediate_size": ACTIVE * WIDTH}),
        "experts": MixtralConfig(**narrow, **experts),
    }.items()
}
pieces = [piece for path in embedded_files()[:60] for piece in path.read_text().split("\n\n") if len(piece) > 100]
_ = Path("runs/pieces.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
plain = tk.Strategy(precision="fp32", attention="sdpa", activation_checkpointing="none", loss="whole")
batch = tk.TrainConfig(seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, steps=STEPS)
# The six switches further below: the first run, and those that may need more.
RUNS = (
    (tk.describe(SMALL["dense"]), plain, batch),
    (tk.describe(SMALL["dense"]), dataclasses.replace(plain, attention="eager"), batch),
    (tk.describe(SMALL["experts"]), plain, batch),
)


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


# %% [markdown]
# The small model's runs, with these numbers. A GPU has larger ones:

# %%
needs(*RUNS)

# %% [markdown]
# ## A large model, before a weight is read
#
# **Your guess:** how long does it take to know every parameter of a model of 70 billion, and how many bytes?
#
# `tk.describe` reads the config and builds the modules on torch's *meta* device: shapes without memory.


# %%
def described(size):
    return tk.describe(f"runs/llama-{size}")


tk.vary(described, size=list(LLAMAS), ahead=True)

# %% tags=["check"]
touched = peak_memory(lambda: described("70B"), KIND)
assert described("70B").elements == 70_553_706_496  # what the published weights of Llama 3 70B hold
assert described("8B").elements == 8_030_261_248
assert touched < described("70B").elements / 1000  # of all these parameters next to no byte was allocated


# %% tags=["helper"]
def who_reads(size, ranks, sharding):
    found = tk.forecast(
        described(size),
        tk.Strategy(sharding=sharding, precision="bf16"),
        f"{ranks // 8} nodes x 8x H100-80GB" if ranks > 8 else f"{ranks}x H100-80GB",
        tk.TrainConfig(seq_len=2048, micro_batch=1),
        advice=False,
    )
    phases = {phase: found.phases[phase] for phase in ("load", "prepare", "forward", "backward", "step", "save")}
    picture = bars(
        [Bar(label=phase, parts={phase: bytes_}) for phase, bytes_ in phases.items()],
        title=f"Llama {size}, {sharding}: a rank's highest need by phase",
        limit=found.limit_bytes,
        limit_label="an H100 has",
    )
    verdict = "fits" if found.fits else "does not fit"
    rows = [(phase, format_bytes(bytes_)) for phase, bytes_ in phases.items()]
    return figure(picture, Table(columns=("phase", f"of each of {ranks} ranks: {verdict}"), rows=rows))


# %% [markdown]
# ## Who reads what
#
# Under `ddp` every rank takes the whole model: the host reads it, and `prepare` copies it onto the card. Under `zero3`
# each rank keeps its own share of every matrix as it arrives, and never holds more than that and one whole matrix. Under
# `fsdp` each rank reads its own rows alone, in `prepare`. Look at `load` and `prepare`, and move the ranks.

# %%
shardings, start = ["ddp", "zero2", "zero3", "fsdp"], {"ranks": 64, "sharding": "zero3"}
tk.vary(who_reads, size=list(LLAMAS), ranks=[8, 16, 32, 64, 128], sharding=shardings, start=start, ahead=True)

# %% tags=["check"]
h100s = "8 nodes x 8x H100-80GB"
row = tk.TrainConfig(seq_len=2048, micro_batch=1)
reading = {
    word: tk.forecast(described("70B"), tk.Strategy(sharding=word, precision="bf16"), h100s, row) for word in shardings
}
share, matrix = 2 * described("70B").elements / 64, 4 * LLAMAS["70B"].vocab_size * LLAMAS["70B"].hidden_size
assert reading["ddp"].phases["prepare"] >= 16 * described("70B").elements
assert abs(reading["zero3"].phases["load"] / (share + matrix) - 1) < 0.02
assert [found.fits for found in reading.values()] == [False, False, True, True]

# %% tags=["helper"]
# The last on-chip cache in MiB: L2 by NVIDIA's architecture white papers, and by the GPU specifications of AMD's ROCm
# documentation the L2 of one of an MI250X's two dies, which is a device of its own, and an MI300X's Infinity Cache.
CACHES = {
    "T4": 4, "V100-32GB": 6, "RTX-3090": 6, "RTX-4090": 72, "L4": 48, "A100-80GB": 40, "H100-80GB": 50, "H200-141GB": 50,
    "MI250X-64GB": 8, "MI300X-192GB": 256,
}  # fmt: skip


def chain(following, reads=100_000):
    """ns of a read that must wait for the last one, interpreter included: the median of nine chains.

    The thread's own time, so that other processes do not count. numpy's memory lies in huge pages where the system has
    them: a look into the page table is not the memory's latency.
    """
    numbers, at, times = memoryview(following), 0, []
    for _ in range(9):
        began = time.thread_time()
        for _ in range(reads):
            at = numbers[at]
        times.append((time.thread_time() - began) / reads * 1e9)
    return statistics.median(times)


def this_processor():
    """The last cache, and two measured figures: GB/s of a long copy, and ns of a read from memory that waits for the last."""
    levels = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    cache = levels[-1].read_text().strip().replace("K", " KiB") if levels else "–"
    source, times = numpy.ones(2**25), []
    target = source.copy()
    for _ in range(9):
        began = time.thread_time()
        numpy.copyto(target, source)
        times.append(time.thread_time() - began)
    bandwidth = 2 * source.nbytes / statistics.median(times) / 1e9
    order = numpy.random.default_rng(0).permutation(2**24)
    scattered = numpy.empty_like(order)
    scattered[order] = numpy.roll(order, -1)  # one cycle through all: a short one would lie in the cache
    latency = chain(scattered) - chain(numpy.roll(numpy.arange(2**24), -1))
    return cache, bandwidth, latency


cache, bandwidth, latency = this_processor()


def precisions(card):
    if card.capability is None:
        return "fp16, bf16, fp32, fp64"
    names = [
        "fp16",
        *(["bf16", "TF32"] if card.capability >= (8, 0) else []),
        *(["fp8"] if card.capability >= (8, 9) else []),
    ]
    return ", ".join([*names, "fp32"])


def hardware_table(compared_with):
    memory = format_bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    measured = (f"{bandwidth:,.0f} GB/s", cache, f"{latency:,.0f} ns")
    rows = [("this processor", os.cpu_count(), memory, "–", *measured, ", ".join(tk.hardware("1x cpu").device.dtypes))]
    base = CARDS[compared_with]
    for name, mib in CACHES.items():
        card = CARDS[name]
        speed = f"{card.tflops_half:g} ({card.tflops_half / base.tflops_half:.1f} x)"
        rows.append(
            (name, "–", f"{card.gib:.0f} GiB", speed, f"{card.memory:,.0f} GB/s", f"{mib} MiB", "–", precisions(card))
        )
    operations = f"TFLOPS in 16 bits (x: {compared_with}'s)"
    columns = ("", "cores", "memory", operations, "bandwidth", "cache", "latency", "precisions")
    note = (
        "GPUs: data sheets; MI250X: one of its two dies, which is a device of its own. "
        "This processor is measured here, the median of nine times: a long copy by one thread, and a chain of "
        "scattered reads, each of which waits for the last, less the same in order. "
        "A GPU hides latency behind thousands of threads; a processor cannot."
    )
    return Table(title="Hardware", columns=columns, rows=rows, notes=(note,))


# %% [markdown]
# ## The hardware it goes to
#
# Two figures decide: how many operations a second a card does, and how many bytes a second its memory gives. Divide
# them: that many operations each byte must be good for, or the card waits for its memory.

# %%
tk.vary(hardware_table, compared_with=list(CACHES), start={"compared_with": "A100-80GB"})

# %% [markdown]
# What is not in the catalog is refused by name, not guessed. Try another one:


# %%
def forecast_on(device):
    return f"{tk.hardware(device).label} is in the catalog."


tk.vary(forecast_on, device=["MI250X", "MI300X", "TPU v5e", "Cerebras CS-3", "ROCm"], start={"device": "TPU v5e"})


# %% tags=["check"]
def refused(name):
    try:
        tk.hardware(name)
    except ToolkitError as error:
        return str(error)
    return ""


assert 5 < bandwidth < 200  # GB/s that one thread copies
assert 20 < latency < 500  # ns of a read from memory
assert "PyTorch/XLA" in refused("TPU v5e")
assert "own software" in refused("Cerebras CS-3")
assert "Name the card" in refused("ROCm")
assert not refused("8x MI250X")

# %% tags=["helper"]
data = tk.RunConfig(model=SMALL["dense"], data="runs/pieces.jsonl")


def profile(run_config=data, **changes):
    return tk.profile_steps(dataclasses.replace(plain, **changes), batch, run_config)


half = "bf16" if "bf16" in tk.hardware().device.dtypes or not GPU else "fp16"
base = profile()
PAIRS = {
    "attention: sdpa or eager": {"sdpa": base, "eager": profile(attention="eager")},
    f"precision: fp32 or {half}": {"fp32": base, half: profile(precision=half)},
    "activations: kept or recomputed": {"kept": base, "recomputed": profile(activation_checkpointing="full")},
    "loss: whole or in chunks": {"whole": base, "chunked": profile(loss="chunked")},
    "rows: packed or padded": {"packed": base, "padded": profile(dataclasses.replace(data, packing=False))},
    "experts: dense or 2 of 8": {
        "dense": profile(dataclasses.replace(data, model=SMALL["as wide as the active experts"])),
        "experts": profile(dataclasses.replace(data, model=SMALL["experts"])),
    },
}

# %% [markdown]
# ## Six choices, each on and off
#
# `tk.load` and the recipe decide these before the first step. Each pair was forecast, then trained for a few steps in
# this kernel. Choose a switch, and compare the two lines:
#
# - **sdpa** computes attention block by block; **eager** writes down a score for each pair of tokens.
# - **bf16** halves activations and leaves the fp32 weights; on a processor without native bf16 it is slower.
# - **Packed** rows hold several documents, none of which sees another. Padded ones hold one, and waste the rest.
# - **Experts**: a token passes through 2 of 8, but all 8 are held, with gradients and moments.


# %%
def switch(choice):
    return StepProfiles(title=choice, trials=PAIRS[choice])


tk.vary(switch, choice=list(PAIRS), start={"choice": next(iter(PAIRS))})


# %% tags=["check"]
def kept(trial):
    """What the forward keeps beside the states: activations and logits."""
    return trial.phases["forward"] - trial.parts["parameters"] - trial.parts["optimizer"]


attention, precision, activations, loss, rows, moe = (list(pair.values()) for pair in PAIRS.values())
copies = 2 * tk.describe(SMALL["dense"]).elements  # autocast keeps bf16 weights
specs = [tk.describe(SMALL[name]) for name in ("as wide as the active experts", "experts")]
assert kept(attention[1]) > kept(attention[0])
assert kept(precision[1]) - copies < kept(precision[0])
assert kept(activations[1]) < kept(activations[0])
assert loss[1].peak_bytes <= loss[0].peak_bytes
assert sum(step.tokens for step in rows[0].steps) > sum(step.tokens for step in rows[1].steps)
assert moe[1].parts["parameters"] > 1.5 * moe[0].parts["parameters"]
assert abs(specs[1].active_elements / specs[0].elements - 1) < 0.01
assert all(0.9 < trial.ratio < 1.1 for pair in PAIRS.values() for trial in pair.values())
most_needed = max(trial.forecast.needed_bytes for pair in PAIRS.values() for trial in pair.values())
assert GPU or needs(*RUNS).rows[0][2] == format_bytes(most_needed)
assert (
    max(abs(a - b) for pair in (attention, activations) for a, b in zip(pair[0].losses, pair[1].losses, strict=True))
    < 1e-3
)

# %% [markdown]
# The same choices at 8 billion parameters on eight H100, as a forecast. Take back one after the other:

# %%
chosen = tk.Strategy(sharding="zero3", precision="bf16", attention="sdpa", activation_checkpointing="full")
two_rows = tk.TrainConfig(seq_len=8192, micro_batch=2)
knobs = ["attention", "precision", "activation_checkpointing", "seq_len", "micro_batch"]
tk.explore("memory", described("8B"), "8x H100-80GB", chosen, two_rows, controls=knobs)


# %% tags=["check"]
def at_8b(**changes):
    return tk.forecast(described("8B"), dataclasses.replace(chosen, **changes), "8x H100-80GB", two_rows)


assert at_8b().fits
assert not at_8b(activation_checkpointing="none").fits
assert at_8b(attention="eager").peak_bytes > at_8b().peak_bytes
assert at_8b(precision="fp32").peak_bytes > at_8b().peak_bytes


# %% tags=["helper"]
def kept_forecast(kernel, length):
    """Activations and logits of one sequence's forward."""
    strategy, one = dataclasses.replace(plain, attention=kernel), tk.TrainConfig(seq_len=length, micro_batch=1)
    spec = tk.describe(SMALL["dense"])
    return (
        tk.forecast(spec, strategy, ranks=1, train_config=one, one_document=True).phases["forward"] - 12 * spec.elements
    )


def kept_measured(kernel):
    accelerator = tk.accelerator(
        dataclasses.replace(plain, attention=kernel), tk.TrainConfig(), tk.describe(SMALL["dense"])
    )
    model, _ = tk.load(accelerator)
    model.to(accelerator.device)
    found = []
    for length in LENGTHS:
        ids = torch.ones((1, length), dtype=torch.long, device=accelerator.device)
        found.append(peak_memory(lambda ids=ids: model(input_ids=ids, labels=ids, use_cache=False).loss, KIND))
    return found


expected = {kernel: [kept_forecast(kernel, length) for length in LENGTHS] for kernel in ("sdpa", "eager")}
measured = {kernel: kept_measured(kernel) for kernel in ("sdpa", "eager")}
gc.collect()


def growth(kernel):
    lines = {
        name: [(length, size / MiB) for length, size in zip(LENGTHS, found[kernel], strict=True)]
        for name, found in (("forecast", expected), ("measured", measured))
    }
    scores = [4 * (WIDTH // 64) * LAYERS * length**2 for length in LENGTHS]
    rows = [
        (length, format_bytes(size), format_bytes(score) if kernel == "eager" else "0 B")
        for length, size, score in zip(LENGTHS, measured[kernel], scores, strict=True)
    ]
    picture = curve(lines, title=f"What a forward keeps, {kernel}", x="tokens", y="MiB", spell_y="{:,.0f}".format)
    return figure(
        picture, Table(columns=("tokens", "measured", "of it scores: 4 bytes x heads x layers x N²"), rows=rows)
    )


# %% [markdown]
# ### Why the kernel matters more for long rows
#
# Double the tokens, and what `sdpa` keeps doubles. What `eager` keeps in addition is a score for each pair of tokens:
# four times as much.

# %%
tk.vary(growth, kernel=["sdpa", "eager"], start={"kernel": "eager"})

# %% tags=["check"]
scores = [4 * (WIDTH // 64) * LAYERS * length**2 for length in LENGTHS]
rest = [eager - sdpa - own for eager, sdpa, own in zip(measured["eager"], measured["sdpa"], scores, strict=True)]
times = [length / LENGTHS[0] for length in LENGTHS]
assert (
    max(abs(size / measured["sdpa"][0] / factor - 1) for size, factor in zip(measured["sdpa"], times, strict=True))
    < 0.1
)
assert max(abs(size / rest[0] / factor - 1) for size, factor in zip(rest, times, strict=True)) < 0.1
assert all(
    abs(one / two - 1) < 0.1 for kernel in expected for one, two in zip(expected[kernel], measured[kernel], strict=True)
)


# %% tags=["helper"]
def cache_bytes(layers, numbers, tokens, bytes_of_number=2):
    """Bytes of a cache that keeps so many numbers a token and layer."""
    return layers * numbers * tokens * bytes_of_number


def caches(tokens, sequences):
    """A model of Llama 3 8B's shape: 32 layers, 32 heads of 128 numbers. MLA as DeepSeek-V3's: a latent of 512, a key of 64."""
    numbers = {
        "MHA: 32 key-value heads": 2 * 32 * 128,
        "GQA: 8 shared by 4 heads each": 2 * 8 * 128,
        "MQA: 1 shared by all": 2 * 128,
        "MLA: a latent of 512 + 64": 512 + 64,
    }
    sizes = {name: cache_bytes(32, each, tokens * sequences) for name, each in numbers.items()}
    picture = bars(
        [Bar(label=name, parts={"buffers": size}) for name, size in sizes.items()],
        title=f"KV cache of {sequences} x {tokens:,} tokens in bf16",
    )
    rows = [(name, numbers[name], format_bytes(size)) for name, size in sizes.items()]
    return figure(picture, Table(columns=("attention", "numbers a token and layer", "bytes"), rows=rows))


# %% [markdown]
# ## The KV cache
#
# While it writes, a model keeps the keys and values of what it has read, and computes each new token alone. Training
# never reads them again, so `tk.load` turns the cache off. For generation its size is a design choice: several heads
# share their keys and values (GQA, MQA), or all are made from one small latent vector (MLA).

# %%
tk.vary(caches, tokens=[1024, 8192, 32768, 131072], sequences=[1, 8, 64], start={"tokens": 8192, "sequences": 1})

# %% tags=["check"]
accelerator = tk.accelerator(plain, tk.TrainConfig(), tk.describe(SMALL["dense"]))
model, tokenizer = tk.load(accelerator)
model.to(accelerator.device).eval()
long = torch.ones((MICRO_BATCH, SEQ_LEN), dtype=torch.long, device=accelerator.device)
prompt = long[:1, :16]
with torch.no_grad():
    cache_held = model(input_ids=long, use_cache=True).past_key_values
    assert model(input_ids=long, use_cache=False).past_key_values is None
heads = model.config.num_key_value_heads * model.config.head_dim
assert model.config.use_cache is False  # as tk.load left it
assert sum(layer.keys.nbytes + layer.values.nbytes for layer in cache_held.layers) == cache_bytes(
    LAYERS, 2 * heads, long.numel(), 4
)
assert cache_bytes(32, 2 * 8 * 128, 8192) == GiB  # of Llama 3 8B


def generated(use_cache):
    asked = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), use_cache=use_cache, **asked)


assert torch.equal(generated(True), generated(False))  # the cache changes the work, not the words
assert tokenizer.pad_token not in (None, tokenizer.eos_token)  # the tokenizer's own, and no weight is added
assert model.get_input_embeddings().num_embeddings == SHAPE["vocab_size"]

# %% [markdown]
# ## The rule
#
# **To be read under ZeRO-3, a model needs 2 bytes a parameter divided by the ranks, and its largest matrix.** If that
# fits, it loads; whether it trains is the sixteen bytes of the notebook before. Move both:


# %%
def to_be_read(size, ranks):
    config, share = LLAMAS[size], 2 * described(size).elements / ranks
    matrix = 4 * config.vocab_size * config.hidden_size
    parts = {"its share": share, "largest matrix": matrix}
    return bars([Bar(label=f"{size} on {ranks}", parts=parts)], title="A rank needs to read it (computed)")


tk.vary(to_be_read, size=list(LLAMAS), ranks=[2, 4, 8, 16, 32, 64, 128], start={"size": "70B", "ranks": 64})

# %% tags=["helper"]
_ = Path("runs/chat.jsonl").write_text(
    "".join(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"What is {n} + {n}?"},
                    {"role": "assistant", "content": f"It is {2 * n}."},
                ]
            }
        )
        + "\n"
        for n in range(50)
    )
)
_ = Path("runs/chatml.jinja").write_text(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ = Path("runs/right.jinja").write_text(
    "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}\nA: {% else %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}\n{% endif %}{% endfor %}"
)

# %% [markdown]
# ## When it goes wrong
#
# You fine-tune on chats with a template that you found, ChatML. The loss falls, and the model never stops talking. A
# template belongs to a tokenizer: this one does not know `<|im_end|>` as a token. `tk.preview` shows it before the run.
# Trained tokens are marked; read the note under the table.


# %%
def chats(template):
    return tk.preview(SMALL["dense"], "runs/chat.jsonl", chat_template=f"runs/{template}.jinja", seq_len=128)


tk.vary(chats, template=["chatml", "right"], start={"template": "chatml"}, ahead=True)

# %% [markdown]
# Move the template to `right`: it ends each answer with the tokenizer's own end token, and marks with `{% generation %}`
# what is trained. Now a run teaches the model to stop.

# %% tags=["check"]
wrong, repaired = chats("chatml"), chats("right")
assert any("no end token" in warning for warning in wrong.warnings)
assert not any("no end token" in warning for warning in repaired.warnings)
assert all(text.endswith("<|eos|>") for each in repaired.rows for text in each["trained"])
assert repaired.counts["tokens"] < wrong.counts["tokens"]  # the strange markers are many small tokens

# %% [markdown]
# ## Exercises
#
# 1. On how many H100-80GB can Llama 405B be trained with `zero3` at all?
# 2. At which length do the scores of `eager` take as much as all else that `sdpa` keeps?
# 3. What would one more token in the vocabulary cost in training, for the pad token say?

# %% tags=["solution"]
ranks, big = 8, described("405B")
while not tk.forecast(big, chosen, f"{ranks // 8} nodes x 8x H100-80GB", row, advice=False).fits:
    ranks *= 2
print(f"{ranks} H100 hold it, {ranks // 2} do not (in doublings).")

# %% tags=["solution"]
a_token = measured["sdpa"][-1] / LENGTHS[-1]
print(
    f"At {a_token / (4 * (WIDTH // 64) * LAYERS):,.0f} tokens: 4 x heads x layers x N = bytes that sdpa keeps of a token."
)

# %% tags=["solution"]
# A row in the embedding and one in the head, with gradient and two moments each: 16 bytes x 2 x width.
# tk.load adds none: it takes the tokenizer's own pad token, or a reserved one.
print(f"{format_bytes(16 * 2 * WIDTH)} here, {format_bytes(16 * 2 * LLAMAS['70B'].hidden_size)} of Llama 70B")

# %% [markdown]
# ## Next
#
# One switch made the largest difference: recomputing activations. [04_activations](04_activations.ipynb) looks inside a
# layer to see why.
