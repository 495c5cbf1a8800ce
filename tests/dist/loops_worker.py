"""The loops of docs/guides/own-loop.md, run as they stand under each sharding: what they compute, and what they refuse."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ranks

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "own-loop.md"
SCRIPTS = Path(__file__).with_name("scripts")
SCRIPTED = ("none", "ddp", "zero2", "zero3", "fsdp")
BATCH, LENGTH, NORM = 8, 16, 0.05


def code(mark: str, changes: dict[str, str]) -> str:
    """The guide's block with a mark, each change made exactly once."""
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S) if mark in block)
    for old, new in changes.items():
        assert block.count(old) == 1, (old, block)
        block = block.replace(old, new)
    return str(block)


def function(sharding: str, count: int) -> str:
    """The loop in a function, which takes its strategy from the launcher and leaves clipping to `step`."""
    changes = {
        "micro_batch=8": f"micro_batch={BATCH // count}",
        "max_grad_norm=1.0": f"max_grad_norm={NORM}",
        "tk.log(step, steps=steps, loss=loss": "log(loss=loss",
        'accelerator.save_state("mine")  # a loop of your own keeps checkpoints of its own': (
            "done(accelerator, model, optimizer)"
        ),
    }
    return "import toolkit as tk\n" + code("def train(steps)", changes).partition("\n\n\nrun =")[0] + "\n\ntrain(10)\n"


def script(sharding: str, count: int) -> str:
    """The loop in a script, with a call of `clip_grad_norm_`. 21 micro-batches: the last step is an incomplete one."""
    groups = ", dp_replicate=2" if sharding == "hsdp" else ""
    return code(
        "tk.prepare(",
        {
            '"Qwen/Qwen3-0.6B"': "folder",
            'sharding="zero3", precision="bf16"': f'sharding="{sharding}", precision="fp32"{groups}',
            "micro_batch=2, accumulation=4, max_grad_norm=1.0, seq_len=2048": (
                f"micro_batch={BATCH // count}, accumulation=2, max_grad_norm={NORM}, seq_len={LENGTH}"
            ),
            'torch.load("rows.pt")': "rows().cpu()",
            "lr=2e-5": "lr=1e-3",
            "accelerator.end_training()": "    log(loss=loss, norm=norm)\ndone(accelerator, model, optimizer)",
        },
    )


def script_of_others(name: str, train_config: str, changes: dict[str, str]) -> Any:
    """The `main` of a script, with its one line changed."""
    text = (SCRIPTS / f"{name}.py").read_text()
    line = re.findall(r"accelerator = (Accelerator\(.*\))\n", text)
    for old, new in {line[0]: f"tk.accelerator(train_config=tk.TrainConfig({train_config}))", **changes}.items():
        assert text.count(old) == 1, (old, text)
        text = text.replace(old, new)
    spaces: dict[str, Any] = {}
    exec("import toolkit as tk\n" + text, spaces)
    return spaces["main"]


def own_group(sharding: str, count: int) -> None:
    """Make the process group that Accelerate takes: one beside those that have ended."""
    from toolkit.config.strategy import Strategy
    from toolkit.config.train_config import TrainConfig
    from toolkit.devices.machine import hardware
    from toolkit.engines.resolution import resolve
    from toolkit.training import setup

    ranks.reset()
    if count > 1:
        setup._init_group(resolve(Strategy(sharding=sharding), TrainConfig(), None, count, hardware().device), None)
        setup._accelerators += 1


def plain(sharding: str, count: int) -> Any:
    """The `main` of a script as it is, on the CPU."""
    from accelerate import Accelerator

    own_group(sharding, count)
    spaces: dict[str, Any] = {}
    exec((SCRIPTS / "accumulation.py").read_text(), spaces)
    spaces["Accelerator"] = partial(Accelerator, cpu=True)
    return spaces["main"]


def scripts(folder: str, count: int, sharding: str) -> dict[str, Any]:
    """What each of the three scripts gives."""
    import toolkit as tk

    root, size = Path(folder).parent, BATCH // count
    states = str(root / f"states-{sharding}")
    results: dict[str, Any] = {
        "accumulation": script_of_others("accumulation", "accumulation=2, max_grad_norm=0", {})(
            str(root / "bert"), size
        )
    }
    if sharding in ("none", "ddp"):
        results["plain"] = plain(sharding, count)(str(root / "bert"), size)
        ranks.reset()
    train_config = "accumulation=3, max_grad_norm=0.5"
    try:
        results["tokens as they are"] = script_of_others("tokens", train_config, {})(folder, size)
    except tk.StrategyError as error:
        results["tokens as they are"] = str(error)
    told = {"ctx = model.no_sync if": "ctx = (lambda: accelerator.no_sync(model)) if"}
    results["tokens"] = script_of_others("tokens", train_config, told)(folder, size)
    checkpoints = script_of_others("checkpoints", "", {})
    results["checkpoints"] = checkpoints(str(root / "bert"), size, states)
    results["resumed"] = checkpoints(str(root / "bert"), size, states, f"{states}/step_4")
    return results


def rows() -> Any:
    import torch

    ids = torch.randint(3, 250, (21 * BATCH, LENGTH), generator=torch.Generator().manual_seed(7))
    return ids.to("cuda" if torch.cuda.is_available() else "cpu")  # where the models compute


def run(cell: dict[str, Any], folder: str) -> dict[str, Any]:
    """Both loops, then scripts of others: one Accelerator after the other in this process."""
    sharding, count = cell["sharding"], int(os.environ.get("WORLD_SIZE", "1"))
    strategy = {"sharding": sharding, "precision": "fp32"} | ({"dp_replicate": 2} if sharding == "hsdp" else {})
    os.environ["TOOLKIT_STRATEGY"] = json.dumps(strategy)
    before, results = dict(os.environ), {}
    try:
        for name, source in (("function", function), ("script", script)):
            losses: list[float] = []
            place = Path(folder).parent / f"{sharding} {name}.pt"

            def log(loss: Any, tokens: int = 0, norm: Any = None, losses: list[float] = losses) -> None:
                losses.append(mean(loss.detach()))
                losses.extend([] if norm is None else [float(norm)])

            def done(accelerator: Any, model: Any, optimizer: Any, name: str = name, place: Path = place) -> None:
                assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
                keep(accelerator, model, optimizer, place)
                if name == "script":
                    results["refusals"] = refusals(accelerator, model, optimizer)
                accelerator.end_training()

            exec(source(sharding, count), {"log": log, "done": done, "rows": rows, "folder": folder})
            results[name] = {"losses": losses, "weights": str(place)}
        if sharding in SCRIPTED:
            results["changed"] = [changed(folder, count, change) for change in (replace_weights, resize)]
            results["unused"] = {case: unused(folder, sharding, count, case) for case in UNUSED}
        if sharding in SCRIPTED:
            results["scripts"] = scripts(folder, count, sharding)
            results["own"] = own(folder, sharding, count)
            results["tied"] = {name: tied(folder, sharding, count, name) for name in TIES}
            results["trainer"] = trainer(folder, sharding, count)
            results["modules"] = modules(count)
        if sharding in ("none", "ddp"):
            results["orders"] = orders(Path(folder).parent / f"orders-{sharding}")
            results["left"] = orders(Path(folder).parent / f"left-{sharding}", leaves=True)
        if sharding in SCRIPTED:
            results["saving"] = {adapter: saving(folder, sharding, adapter) for adapter in ("none", "lora")}
        if sharding == "ddp":
            results["silent"] = {
                adapter: saving(folder, sharding, adapter, silent=True) for adapter in ("none", "lora")
            }
        if sharding == "fsdp":
            results["mismatch"] = mismatch(folder)
    finally:
        del os.environ["TOOLKIT_STRATEGY"]
    return results


def orders(place: Path, leaves: bool = False) -> dict[str, Any]:
    """For each kind of sampler: the second epoch's last batches and the third epoch, those of a resumed run, and the lines.

    `leaves`: the loop leaves its second epoch in the middle and saves behind it. Then the epochs that follow, of both runs.
    """
    import random
    from dataclasses import dataclass

    import torch
    from accelerate import skip_first_batches
    from torch.utils.data import (
        BatchSampler,
        DataLoader,
        IterableDataset,
        RandomSampler,
        Sampler,
        WeightedRandomSampler,
    )

    import toolkit as tk

    class Mine(Sampler[int]):
        def __len__(self) -> int:
            return 24

        def __iter__(self) -> Any:
            yield from random.sample(range(24), 24)

    class Pairs(BatchSampler):
        def __iter__(self) -> Any:
            yield from torch.randperm(24).view(-1, 2).tolist()

    @dataclass  # which is no key of a dictionary
    class Stream(IterableDataset[int]):
        generator = torch.Generator()

        def __iter__(self) -> Any:
            yield from torch.randperm(24, generator=self.generator).tolist()

    rows = torch.arange(24)
    kinds: dict[str, Callable[[], Any]] = {
        "shuffle": lambda: DataLoader(rows, 2, shuffle=True),
        "workers": lambda: DataLoader(rows, 2, shuffle=True, num_workers=1),
        "a generator": lambda: DataLoader(rows, 2, shuffle=True, generator=torch.Generator()),
        "weights": lambda: DataLoader(rows, 2, sampler=WeightedRandomSampler(range(1, 25), 24)),
        "a batch_sampler": lambda: DataLoader(rows, batch_sampler=BatchSampler(RandomSampler(rows), 2, False)),
        "a sampler of one's own": lambda: DataLoader(rows, 2, sampler=Mine()),
        "batches of one's own": lambda: DataLoader(rows, batch_sampler=Pairs(Mine(), 2, False)),
        "an iterable": lambda: DataLoader(Stream(), 2),
        "a list": lambda: DataLoader(rows, batch_sampler=[[one, one + 1] for one in range(0, 24, 2)]),
    }

    def epochs(kind: str, resumed: bool) -> tuple[list[Any], list[str]]:
        accelerator, said = tk.accelerator(), []
        accelerator.print = said.append
        Stream.generator.manual_seed(int(resumed))
        random.seed(resumed)
        torch.manual_seed(int(resumed))
        loader, seen = accelerator.prepare(kinds[kind]()), []
        if resumed:
            accelerator.load_state(str(place / kind))
        for epoch in range(1 + leaves if resumed else 0, 4):
            skipped = skip_first_batches if kind == "workers" else accelerator.skip_first_batches
            ids = []
            for number, batch in enumerate(skipped(loader, 2) if resumed and epoch == 1 else loader):
                torch.rand(1)  # dropout
                ids += accelerator.gather(batch).tolist()
                if epoch == 1 and number == 1 and not resumed:
                    if leaves:
                        break
                    accelerator.save_state(str(place / kind))
                    ids = []
            seen.append(ids)
            if leaves and epoch == 1:
                accelerator.save_state(str(place / kind))
        accelerator.end_training()
        return seen if resumed else seen[1 + leaves :], said

    epochs_of = {}
    for kind in kinds:
        (whole, said), (resumed, _) = epochs(kind, False), epochs(kind, True)
        epochs_of[kind] = (whole, resumed) if leaves else (whole, resumed, said)
    return epochs_of


def replace_weights(model: Any) -> None:
    """What scripts do to a loaded model; ranks draw other values, and rank 0's count."""
    import torch

    rank = int(os.environ.get("RANK", "0"))
    draw = torch.Generator().manual_seed(rank)
    layers, embedding = model.model.layers, model.get_input_embeddings()
    torch.manual_seed(rank)
    model.lm_head = torch.nn.Linear(64, 256, bias=False)
    torch.nn.init.normal_(layers[1].self_attn.q_proj.weight, std=0.05, generator=draw)
    layers[1].mlp.up_proj.weight.data *= 1.5
    with torch.no_grad():
        embedding.weight[7] = embedding.weight[8:12].mean(0)
    layers[1].mlp.down_proj.weight.data = torch.randn(64, 192, generator=draw) * 0.05
    model.model.layers = layers[1:]  # the rest moves to other names
    model.shift = torch.nn.Parameter(torch.full((64,), 0.1))
    model.model.norm.register_forward_hook(lambda module, _, hidden: hidden + model.shift)


def resize(model: Any) -> None:
    copy.deepcopy(model)  # a reference model, with all values
    model.resize_token_embeddings(263, mean_resizing=False)


def changed(folder: str, count: int, change: Callable[[Any], None]) -> list[float]:
    """Losses of a model that was changed between `load` and `prepare`."""
    import torch

    import toolkit as tk

    accelerator = tk.accelerator(None, tk.TrainConfig(micro_batch=BATCH // count), tk.describe(folder))
    model, _ = tk.load(accelerator)
    torch.manual_seed(0)
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = tk.prepare(accelerator, model, optimizer)
    first = accelerator.process_index * BATCH // count
    ids = rows()[first : first + BATCH // count]
    losses = [stepped(accelerator, optimizer, model(input_ids=ids, labels=ids).loss) for _ in range(2)]
    accelerator.end_training()
    return losses


UNUSED = {
    "class token": lambda step, rank: True,
    "never": lambda step, rank: False,
    "some steps": lambda step, rank: step % 2 == 0,
    "one rank": lambda step, rank: rank == 0,
    "scalar": lambda step, rank: True,
    "one parameter": lambda step, rank: True,
}
"""Whether a step of a rank uses the second layer of a module of the user's own."""


def unused(folder: str, sharding: str, count: int, case: str) -> dict[str, Any]:
    """Losses of a module with parameters that some steps do not use, or the sentence; again with `find`, where that runs."""
    import torch

    import toolkit as tk
    from toolkit.config.strategy import SHARDINGS

    class Module(torch.nn.Module):
        step = 0

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
            self.token = torch.nn.Parameter(torch.tensor(1.0) if case == "scalar" else torch.randn(1, 16))

        def forward(self, inputs: Any) -> Any:
            hidden = self.first(inputs) * self.token
            return hidden + self.second(hidden) if UNUSED[case](self.step, accelerator.process_index) else hidden

    def train(accelerator: Any) -> list[float]:
        torch.manual_seed(3)
        module, losses, draw = Module(), [], torch.Generator().manual_seed(7)
        for layer in (module.first, module.second):
            layer.requires_grad_(case != "one parameter")
        model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
        for module.step in range(4):
            inputs = torch.randn(BATCH, 16, generator=draw).split(BATCH // count)[accelerator.process_index]
            losses.append(stepped(accelerator, optimizer, (model(inputs.to(accelerator.device)) ** 2).mean()))
        return losses

    results: dict[str, Any] = {}
    for word in SHARDINGS[sharding].unused_parameters:
        # Under zero3 a layer that one rank alone gathers is no matter of gradients.
        if case == "one rank" and (sharding in ("none", "zero3") or (sharding, word) == ("fsdp", "find")):
            continue
        spec = tk.describe(folder) if sharding.startswith("zero") else None
        accelerator = tk.accelerator({"unused_parameters": word}, tk.TrainConfig(micro_batch=BATCH // count), spec)
        said: list[str] = []
        accelerator.print = said.append
        try:
            results[word] = train(accelerator)
            results["said"] = [line for line in said if line.startswith("gradients")]
        except tk.StrategyError as error:
            results[word] = str(error)
        accelerator.end_training()
    return results


def modules(count: int) -> dict[str, Any]:
    """A plain module with a batch norm: losses in training and evaluation on each rank, rows of an iterable, two sentences."""
    import torch
    from accelerate.utils import gather_object
    from torch.utils.checkpoint import checkpoint
    from torch.utils.data import DataLoader, IterableDataset

    import toolkit as tk

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            yield from range(10)

    accelerator = tk.accelerator(train_config=tk.TrainConfig(micro_batch=BATCH // count))
    accelerator.print = lambda *_: None
    torch.manual_seed(5)
    first, norm = torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16)
    module = torch.nn.Sequential(first, norm, torch.nn.ReLU(), torch.nn.Linear(16, 1)).double()
    first.requires_grad_(False)
    trained = [each for each in module.parameters() if each.requires_grad]
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(trained, lr=0.1))
    inputs = torch.randn(4, BATCH, 16, generator=torch.Generator().manual_seed(7), device="cpu").to(accelerator.device)

    def loss(step: int, train: bool = True) -> Any:
        model.train(train)
        ours = inputs[step].double().split(BATCH // count)[accelerator.process_index if train else 0]
        return (model(ours) ** 2).mean()

    losses = [stepped(accelerator, optimizer, loss(step)) for step in range(2)]
    with torch.no_grad():
        evaluated = gather_object([float(loss(2, train=False))])
    seen: list[int] = []
    for batch in accelerator.prepare(DataLoader(Stream(), batch_size=2)):
        seen += accelerator.gather_for_metrics(batch).tolist()
    said = {}
    for name in ("reentrant", "unfrozen"):
        first.requires_grad_(name == "unfrozen")
        value = loss(3)
        if name == "reentrant":
            value = checkpoint(torch.square, value, use_reentrant=True)
        said[name] = sentence_of(partial(accelerator.backward, value))
    accelerator.end_training()
    return {"losses": losses, "evaluated": evaluated, "seen": seen, "said": said}


def trainer(folder: str, sharding: str, count: int) -> Any:
    """The script with a Trainer, on ranks as `toolkit launch` starts them; and what an audit of another request says."""
    import accelerate.accelerator
    from accelerate.state import AcceleratorState, PartialState

    import toolkit as tk
    from toolkit.engines import upstream
    from toolkit.training import plain_accelerate

    launched = {
        "zero2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
        "zero3": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
        "fsdp": {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
            "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        },
    }.get(sharding, {}) | {"ACCELERATE_MIXED_PRECISION": "no"}
    place = Path(folder).parent / f"trainer-{sharding}"
    (place / "logs").mkdir(parents=True, exist_ok=True)
    own_group(sharding, count)
    saved = (
        dict(os.environ),
        (PartialState.__init__, AcceleratorState.__init__),
        {name: getattr(accelerate.Accelerator, name) for name in ("prepare", "backward", "clip_grad_norm_")},
    )
    os.environ.update(launched, TOOLKIT_RUN_DIR=str(place))
    upstream.made_by_toolkit = False
    spaces: dict[str, Any] = {}
    try:
        plain_accelerate._distribute(accelerate.accelerator)
        exec((SCRIPTS / "trainer.py").read_text(), spaces)
        spaces["Trainer"] = partial(spaces["Trainer"], callbacks=[tk.AuditCallback(), tk.AuditCallback()])
        kind, losses, model, optimizer, its_accelerator = spaces["main"](folder, str(place))
        clip = partial(its_accelerator.clip_grad_norm_, model.parameters(), 0.5)
        clips = sentence_of(clip) if sharding.startswith("zero") else ""
        os.environ |= {"TOOLKIT_STRATEGY": "{}", "ACCELERATE_USE_DEEPSPEED": "false", "ACCELERATE_USE_FSDP": "false"}
        try:
            said = str(tk.audit(model, optimizer).engine)
        except tk.StrategyMismatch as error:
            said = str(error)
    finally:
        upstream.made_by_toolkit = True
        PartialState.__init__, AcceleratorState.__init__ = saved[1]
        for name, function in saved[2].items():
            setattr(accelerate.Accelerator, name, function)
        os.environ.clear()
        os.environ.update(saved[0])
        if sharding.startswith("zero"):
            from deepspeed import comm

            comm.destroy_process_group()  # as `end_training` does
        PartialState().destroy_process_group()
        ranks.reset()
    audited = json.loads((place / "logs/audit.json").read_text())
    logged = [json.loads(line) for line in (place / "events.jsonl").read_text().splitlines()]
    return {"kind": kind, "losses": losses, "said": said, "audited": audited, "logged": logged, "clips": clips}


def own(folder: str, sharding: str, count: int) -> dict[str, Any]:
    """A loop over a model of the user's own: partly frozen, with a teacher and a buffer that differs on every rank."""
    import torch
    from transformers import AutoModelForCausalLM

    import toolkit as tk

    accelerator = tk.accelerator(
        None, tk.TrainConfig(max_grad_norm=NORM, micro_batch=BATCH // count), tk.describe(folder)
    )
    said: list[str] = []
    accelerator.print = said.append
    rank = accelerator.process_index
    if sharding in ("ddp", "zero3"):  # the others take no model without its optimizer
        accelerator.prepare(torch.nn.Linear(4, 4))
    model = AutoModelForCausalLM.from_pretrained(folder)
    whole_shapes = [each.numel() for each in model.parameters() if each.dim() > 1]
    model.model.embed_tokens.requires_grad_(False)
    model.model.norm.register_buffer("shift", torch.full((64,), 0.5 + rank, device=model.device))
    model.model.norm.register_forward_hook(lambda module, _, hidden: hidden + module.shift)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = rows()[rank * BATCH // count : (rank + 1) * BATCH // count]
    figures = []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], NORM)
        optimizer.step()
        optimizer.zero_grad()
        figures += [mean(loss.detach()), float(norm)]
    kept = [name for name in accelerator.get_state_dict(model) if name.endswith("shift")]
    accelerator.end_training()
    return {"figures": figures, "said": said, "kept": kept, "whole_shapes": whole_shapes}


def saving(folder: str, sharding: str, adapter: str, silent: bool = False) -> dict[str, Any]:
    """Losses around `generate`, its tokens on rank 0 next to one process's, and how what a script saves differs from `tk.save`."""
    import torch
    from safetensors.torch import load_file

    import toolkit as tk

    place = Path(folder).parent / f"saved-{sharding}-{adapter}"
    strategy = {"adapter": adapter, "activation_checkpointing": "full"}
    accelerator = tk.accelerator(strategy, tk.TrainConfig(micro_batch=2), tk.describe(folder))
    accelerator.print = lambda *_: None
    model, tokenizer = tk.load(accelerator)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = tk.prepare(accelerator, model, optimizer)
    prepared, module = tk.prepared(accelerator, (model, optimizer)), accelerator.unwrap_model(model)
    ids, losses, results = rows()[: 4 * 4].view(4, 4, LENGTH), [], {}

    def train(step: int) -> None:
        here = slice(None) if accelerator.num_processes == 1 else slice(accelerator.process_index, None, 2)
        loss = model(input_ids=ids[step, here], labels=ids[step, here]).loss
        losses.append(stepped(accelerator, optimizer, loss))

    train(0)
    if not silent:
        tk.save(prepared, tokenizer, place)
        prompt = ids[3, :1, : 5 + accelerator.process_index]  # the ranks end in different steps
        greedy = {"attention_mask": torch.ones_like(prompt), "max_length": 12, "do_sample": False}
        for name, owner in (("eval", module), ("train", module), ("wrapped", model)):
            model.train(name != "eval")
            results[name] = owner.generate(input_ids=prompt, **greedy)[0].tolist()
        if accelerator.is_main_process:
            whole_model = reopened(folder, place, adapter)
            results["one process"] = whole_model.generate(input_ids=prompt, synced_gpus=False, **greedy)[0].tolist()
        accelerator.wait_for_everyone()
    for step in (1, 2):
        train(step)
    if silent:
        accelerator.end_training()
        return {"losses": losses}
    tk.save(prepared, tokenizer, place)
    accelerator.wait_for_everyone()
    options = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
    ways: dict[str, Callable[[Path], Any]] = {
        "state_dict": lambda folder: accelerator.save(module.state_dict(), folder / "w.pt"),
        "save_pretrained": lambda folder: module.save_pretrained(folder),
        "documented": lambda f: module.save_pretrained(f, state_dict=accelerator.get_state_dict(model), **options),
        "save_model": lambda folder: accelerator.save_model(model, folder),
    }
    (whole,) = (load_file(path) for path in place.glob("*.safetensors"))
    for name, save in ways.items():
        folder_of_way = Path(f"{place}-{name}")
        folder_of_way.mkdir(exist_ok=True)
        try:
            save(folder_of_way)
        except tk.ToolkitError as error:
            results[name] = str(error)
            continue
        accelerator.wait_for_everyone()
        (path,) = (path for path in folder_of_way.iterdir() if path.suffix in (".safetensors", ".pt"))
        read = load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu")
        tensors = {name.replace(".default.", "."): tensor for name, tensor in read.items()}
        wrong = [name for name, tensor in whole.items() if not torch.equal(tensor, tensors.get(name, torch.empty(0)))]
        results[name] = f"{len(whole) - len(wrong)} of {len(whole)} tensors are right"
    if sharding == "zero3":
        results["alone"] = alone(accelerator, lambda: accelerator.get_state_dict(model))
    accelerator.end_training()
    return {**results, "losses": losses}


def reopened(folder: str, place: Path, adapter: str) -> Any:
    """The saved model in one process, by transformers and PEFT alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from toolkit.models.hf_loading import without_engine

    with without_engine():
        model = AutoModelForCausalLM.from_pretrained(place if adapter == "none" else folder)
        model = model if adapter == "none" else PeftModel.from_pretrained(model, place)
    return model.to(rows().device)


def alone(accelerator: Any, call: Callable[[], Any]) -> str:
    """What a collective says on rank 0 when the other rank does not come."""
    from datetime import timedelta

    import torch.distributed as dist

    from toolkit.engines.timeouts import limit_all

    store, said = dist.distributed_c10d._get_default_store(), ""
    if accelerator.is_main_process:
        limit_all(timedelta(seconds=1))
        said = sentence_of(call)
        store.set("tests/alone", said)
    store.wait(["tests/alone"])
    return said


def head(model: Any) -> Any:
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def layer(model: Any) -> Any:
    model.model.layers[1] = model.model.layers[0]
    return model


def across_layers(model: Any) -> Any:
    model.model.layers[1].mlp = model.model.layers[0].mlp
    return model


def across_groups(model: Any) -> Any:
    model.model.layers[1].input_layernorm.weight = model.model.norm.weight
    return model


def copies(model: Any, **words: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    saved = ["embed_tokens", "lm_head"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved, **words))


def tied_copies(model: Any) -> Any:
    return copies(model, ensure_weight_tying=True)


TIES = {function.__name__: function for function in (head, layer, across_layers, across_groups, copies, tied_copies)}


def tied(folder: str, sharding: str, count: int, name: str) -> dict[str, Any]:
    """Two steps of a model with a weight under several names, and the error of what transformers opens; or a refusal."""
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    import toolkit as tk
    from toolkit.models.hf_loading import without_engine

    base, out = Path(folder), Path(folder).parent / f"saved-{sharding}-{name}"
    base = base.with_name("tied") if "copies" in name else base
    accelerator, said = tk.accelerator(None, tk.TrainConfig(micro_batch=BATCH // count)), list[str]()
    accelerator.print = said.append
    torch.manual_seed(0)
    model = TIES[name](AutoModelForCausalLM.from_pretrained(base)).train()
    names = set(dict(model.named_parameters(remove_duplicate=False)))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    try:
        model, optimizer = accelerator.prepare(model, optimizer)
    except tk.StrategyError as error:
        accelerator.end_training()
        return {"refused": str(error)}
    ids = rows()[accelerator.process_index * BATCH // count :][: BATCH // count]
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    losses = [stepped(accelerator, optimizer, model(**inputs).loss) for _ in range(2)]
    tk.save(tk.prepared(accelerator, (model, optimizer)), None, out)
    same = True
    if name == "tied_copies":
        module, documented = accelerator.unwrap_model(model), Path(f"{out}-documented")
        options = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
        module.save_pretrained(documented, state_dict=accelerator.get_state_dict(model), **options)
        if accelerator.is_main_process:
            saved, ours = (load_file(each / "adapter_model.safetensors") for each in (documented, out))
            same = saved.keys() == ours.keys() and all(torch.equal(saved[key], ours[key]) for key in ours)
    probe = {"input_ids": rows()[:1], "use_cache": False}
    with torch.no_grad():
        trained = model(**probe).logits
        if accelerator.is_main_process:
            with without_engine():
                opened = AutoModelForCausalLM.from_pretrained(base if "copies" in name else out)
                opened = PeftModel.from_pretrained(opened, out) if "copies" in name else opened
            error = float((opened.to(trained.device)(**probe).logits - trained).norm() / trained.norm())
            assert names == set(dict(opened.named_parameters(remove_duplicate=False)))
    accelerator.end_training()
    unreached = [line for line in said if line.startswith("gradients")]
    return {
        "losses": losses,
        "error": error if accelerator.is_main_process else None,
        "same": same,
        "unreached": unreached,
    }


def stepped(accelerator: Any, optimizer: Any, loss: Any) -> float:
    """Backward and step of one loss; its mean over the ranks."""
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return mean(loss.detach())


def sentence_of(call: Callable[[], Any]) -> str:
    """What a call is refused with, or nothing."""
    import toolkit as tk

    try:
        call()
    except (tk.ToolkitError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def mean(loss: Any) -> float:
    """Over the ranks."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return float(loss)


def keep(accelerator: Any, model: Any, optimizer: Any, place: Path) -> None:
    """Save the whole weights, put together from what each rank holds."""
    import torch
    from accelerate.utils import gather_object

    from toolkit.engines.shards import copy, parts, whole_box
    from toolkit.training.preparation import prepared

    ours = prepared(accelerator, (model, optimizer))
    shards = [shard for shard in ours.job.engine.shards(ours) if shard.kind == "parameter"]
    held = gather_object([(s.name, s.shape, [(box, view.clone()) for box, view in parts(s)]) for s in shards])
    if accelerator.is_main_process:
        whole = {name: torch.full(shape, float("nan")) for name, shape, _ in held}
        for name, shape, boxes in held:
            copy(boxes, [(whole_box(shape), whole[name])])
        torch.save(whole, place)


def refusals(accelerator: Any, model: Any, optimizer: Any) -> dict[str, str]:
    """What each call gives that some engine cannot do: the sentence, or nothing."""
    import torch

    import toolkit as tk

    ids = rows()[:2]

    def no_sync() -> None:
        with model.no_sync():
            pass

    def backward_twice() -> None:
        for _ in range(2):
            accelerator.backward(model(input_ids=ids, labels=ids).loss)

    def not_finite() -> None:
        optimizer.step()
        accelerator.backward(model(input_ids=ids, labels=ids).loss * torch.inf)
        optimizer.step()

    def other_rates() -> None:
        """A scheduler of an optimizer that is not the prepared one."""
        other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
        accelerator.prepare_scheduler(torch.optim.lr_scheduler.ConstantLR(other))
        optimizer.step()

    def plain_backward() -> None:
        optimizer.step()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    def written() -> None:
        if accelerator.job.strategy.engine == "deepspeed":
            with torch.no_grad():
                next(model.parameters()).clamp_(-1, 1)
            accelerator.backward(model(input_ids=ids, labels=ids).loss)

    def backward(owner: Any = model) -> None:
        optimizer.zero_grad()
        accelerator.backward(owner(input_ids=ids, labels=ids).loss)

    def gradients_read() -> None:
        backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    def rates_between() -> None:
        optimizer.step()
        backward()
        optimizer.param_groups[0]["lr"] *= 2
        optimizer.step()

    def hook() -> None:
        weight = next(model.parameters())
        handle = weight.register_hook(lambda gradient: gradient * 0)
        try:
            backward()
            optimizer.step()
        finally:
            handle.remove()

    def accumulation() -> None:
        steps = accelerator.gradient_accumulation_steps
        accelerator.gradient_accumulation_steps = 5
        accelerator.gradient_accumulation_steps = steps

    def two_models() -> None:
        if accelerator.job.strategy.engine in ("deepspeed", "fsdp"):
            pair = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            accelerator.prepare(*pair, torch.optim.SGD(pair[0].parameters()))

    def second_optimizer() -> None:
        if accelerator.job.strategy.engine == "deepspeed":
            other = torch.nn.Linear(4, 4)
            accelerator.prepare(other, torch.optim.SGD(other.parameters()))

    calls: dict[str, Callable[[], Any]] = {
        "another_norm": lambda: accelerator.clip_grad_norm_(model.parameters(), 0.5),
        "some_parameters": lambda: accelerator.clip_grad_norm_(list(model.parameters())[:1], NORM),
        "single_values": lambda: accelerator.clip_grad_value_(model.parameters(), 0.5),
        "closure": lambda: optimizer.step(lambda: None),
        "no_sync": no_sync,
        "backward_twice": backward_twice,
        "accumulation": accumulation,
        "two_models": two_models,
        "not_finite": not_finite,
        "second": lambda: tk.accelerator(train_config=accelerator.job.train_config),
        "other_accumulation": lambda: tk.accelerator(train_config=tk.TrainConfig(accumulation=7)),
        "second_optimizer": second_optimizer,
        "plain_backward": plain_backward,
        "written": written,
        "not_called": lambda: (backward(accelerator.unwrap_model(model)), optimizer.step()),
        "gradients_read": gradients_read,
        "hook": hook,
        "rates_between": rates_between,
        "own_backward": lambda: model(input_ids=ids, labels=ids).loss.backward(),
        "rows": lambda: accelerator.prepare(torch.utils.data.DataLoader(ids.cpu(), batch_size=None)),
        "other_rates": other_rates,
    }
    sentences = {name: sentence_of(call) for name, call in calls.items()}
    assert accelerator.gradient_accumulation_steps == accelerator.job.train_config.accumulation
    return sentences


def mismatch(folder: str) -> str:
    """What plain `prepare` says where Accelerate would silently take DDP, as it does for FSDP on a CPU."""
    import torch
    from accelerate.utils import DistributedType
    from transformers import AutoModelForCausalLM

    import toolkit as tk

    accelerator = tk.accelerator()
    accelerator.state.distributed_type = DistributedType.MULTI_CPU
    model = AutoModelForCausalLM.from_pretrained(folder)
    try:
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    except tk.StrategyMismatch as error:
        return str(error)
    finally:
        accelerator.end_training()
    return ""


if __name__ == "__main__":
    ranks.main(run, *sys.argv[1:])
