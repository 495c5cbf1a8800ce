"""`make notebooks`: executes the sources in this folder, NN_name.py → NN_name.ipynb with outputs.

Tests execute them by the same functions, with other parameters.
"""

from __future__ import annotations

import ast
import asyncio
import getpass
import json
import os
import re
import socket
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from nbclient.output_widget import OutputWidget
from traitlets.config import Config

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
LIMIT = 300
"""Seconds that a notebook may take with its default parameters, on two cores."""
INSTALL = '''# Installs the toolkit where it is missing, as on Colab; elsewhere it does nothing. An installed torch stays as it is.
import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile


def number(version):
    """To compare versions: what is installed and newer stays, too."""
    return [int(part) for part in version.split(".") if part.isdigit()]


if importlib.util.find_spec("toolkit") is None:
    wanted = "WANTED"  # or the path of a wheel
    tested = "TESTED"
    here = {str(found.metadata["Name"]).lower(): found.version for found in importlib.metadata.distributions()}
    pins = dict(pin.split("==") for pin in tested.split())
    pins = {name: pin for name, pin in pins.items() if number(here.get(name, "0")) < number(pin)}
    pins |= {"torch": here["torch"]} if "torch" in here else {}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        print(*(f"{name}=={pin}" for name, pin in pins.items()), sep="\\n", file=constraints, flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", constraints.name]
        subprocess.run([*pip, wanted], check=True)'''
CHECK, INSTALLS = "check", "install"
FOLDED = frozenset({CHECK, INSTALLS, "helper", "solution"})
"""Tags of cells that JupyterLab folds: claims, the installation, code that draws, answers to exercises."""
RUNS = "runs"
"""What a notebook leaves lies in this folder, which git ignores."""
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"},
}
"""Of every notebook: without the versions and places of the machine that executed it."""


def repository() -> str:
    """`owner/name` on GitHub, as pyproject.toml says it."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["notebooks"]["repository"])


def colab_link(name: str) -> str:
    """The line of a notebook that opens it in Colab, without a picture of the network; empty while there is no address."""
    owned = repository()
    return (
        f"[Open in Colab](https://colab.research.google.com/github/{owned}/blob/main/notebooks/{name}.ipynb)"
        if owned
        else ""
    )


PINNED = {"notebook": ("accelerate", "transformers", "peft")}
PINNED["all"] = (*PINNED["notebook"], "deepspeed", "bitsandbytes")
"""Extra → the libraries that an install cell takes in their tested versions."""

EXTRAS = {"01_first_run": "notebook"}
"""Notebook → the only extra that it needs; others have parts of every one."""


def install_cell(name: str, wanted: str = "") -> str:
    """The cell of a notebook that installs the toolkit where it is missing.

    `wanted`: a wheel's path, in place of what pyproject.toml says.
    """
    owned, extra = repository(), EXTRAS.get(name, "all")
    wanted = wanted or f"accelerate-toolkit[{extra}]" + (f" @ git+https://github.com/{owned}" if owned else "")
    return INSTALL.replace("WANTED", wanted).replace("TESTED", " ".join(_tested(PINNED[extra])))


def _tested(names: Sequence[str]) -> list[str]:
    """The tested version of each of these libraries, as constraints.txt pins it."""
    pins = dict(re.findall(r"^([\w-]+)(==\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    return [name + pins[name] for name in names]


def sources(chosen: Sequence[str] = ()) -> list[Path]:
    """The notebooks' sources, in their order; with `chosen`, those with such a beginning of their name."""
    found = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
    return [path for path in found if not chosen or path.name.startswith(tuple(chosen))]


def address(source: Path) -> None:
    """Let the link and the install cell of a notebook and its source follow the repository."""
    link = colab_link(source.stem)
    text = re.sub(r"^# \[!?\[?Open in Colab.*\n#\n", "", source.read_text(), flags=re.M)
    text = re.sub(r"^# # .*\n#\n", lambda title: title[0] + f"# {link}\n#\n" * bool(link), text, count=1, flags=re.M)
    source.write_text(
        re.sub(r"^# Installs the toolkit.*?(?=\n\n# %%)", lambda _: install_cell(source.stem), text, flags=re.M | re.S)
    )
    made = source.with_suffix(".ipynb")
    notebook, cells = nbformat.read(made, 4), read(source).cells
    for number in (0, 1):
        notebook.cells[number].source = cells[number].source
    nbformat.write(notebook, made)


def read(source: Path, parameters: Mapping[str, Any] | None = None) -> nbformat.NotebookNode:
    """The notebook of a source, without outputs; `parameters` replace the values in the cell that is tagged so.

    Raises:
        ValueError: for a parameter that this cell does not set exactly once, in a line of its own.
    """
    notebook = jupytext.read(source, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"  # not a new one each time
        cell.metadata = _metadata([*cell.metadata.get("tags", ()), *([INSTALLS] if _installs(cell) else [])])
    (tagged,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    for name, value in (parameters or {}).items():
        tagged.source, count = re.subn(
            rf"^{name} = .*$", lambda _, line=f"{name} = {value!r}": line, tagged.source, flags=re.MULTILINE
        )
        if count != 1:
            raise ValueError(f"{source.name}: its parameters set {name} {count} times, expected once in a line.")
    return notebook


def _metadata(tags: Sequence[str]) -> nbformat.NotebookNode:
    """A cell's metadata: its tags; JupyterLab folds the source of what is no lesson, and what a check prints."""
    tags = list(dict.fromkeys(tags))
    folded = {"source_hidden": True} if FOLDED & set(tags) else {}
    folded |= {"outputs_hidden": True} if CHECK in tags else {}
    return nbformat.from_dict(({"jupyter": folded} if folded else {}) | ({"tags": tags} if tags else {}))


def _installs(cell: nbformat.NotebookNode) -> bool:
    return bool(cell.source.startswith(INSTALL.partition("\n")[0]))


def visible(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cells that a reader sees unfolded."""
    return [cell for cell in notebook.cells if not FOLDED & set(cell.metadata.get("tags", ()))]


def claims(notebook: nbformat.NotebookNode) -> list[str]:
    """Every `assert` of its cells that runs whenever its cell does: what the notebook claims, and computes.

    Those in loops are left out: a loop may be over nothing.
    """
    trees = [ast.parse(cell.source) for cell in notebook.cells if cell.cell_type == "code"]
    always = (ast.Module, ast.With)
    found: list[str] = []

    def look(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Assert):
                found.append(ast.unparse(child.test))
            elif isinstance(child, always):
                look(child)

    for tree in trees:
        look(tree)
    return found


class _Kept(OutputWidget):
    """Keeps what an output widget shows, as nbclient does, and does not tell the kernel what it has kept.

    nbclient waits for a reply on the socket of this message, which may take that reply's wake-up with it: about
    every fiftieth cell with a slider then waited without end (jupyter/nbclient#312).
    """

    def sync_state(self) -> None:
        pass


def execute(notebook: nbformat.NotebookNode, folder: Path, *, limit: float = LIMIT, path: Sequence[Path] = ()) -> float:
    """Run every cell in a kernel of its own, in `folder`, with `path` before Python's own. The seconds it took.

    Raises:
        nbclient.exceptions.CellExecutionError: where a cell fails, a claim included.
        TimeoutError: after `limit` seconds; the kernel is ended.
        nbclient.exceptions.DeadKernelError: if it ended on its own.
    """
    began = time.monotonic()
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=None,
        record_timing=False,
        coalesce_streams=True,  # words that are printed one by one are one text
        # No ports: another process may take one between when it is chosen and when the kernel listens there.
        config=Config({"KernelManager": {"transport": "ipc", "connection_file": str(folder / ".kernel.json")}}),
        resources={"metadata": {"path": str(folder)}},
    )
    client.widget_registry = {"@jupyter-widgets/output": {"OutputModel": _Kept}}
    # The kernel imports this checkout's toolkit, and keeps nothing in the user's IPython.
    places = os.pathsep.join(filter(None, (*map(str, path), str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": places, "IPYTHONDIR": str(folder / ".ipython")}
    try:
        asyncio.run(asyncio.wait_for(client.async_execute(env=environment), limit))
    except (TimeoutError, DeadKernelError):  # the second is what nbclient makes of being cancelled in a cell
        if time.monotonic() - began < limit:
            raise
        at = next((cell.source for cell in notebook.cells if cell.get("execution_count", 0) is None), "its end")
        raise TimeoutError(f"the notebook took longer than {limit:g} s, and was ended at:\n{at}") from None
    notebook.metadata = nbformat.from_dict(METADATA)
    return time.monotonic() - began


def tidied(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """The same, as it is kept: no output names the folders, the account or the host where it was made.

    Nor does one say anything twice, or show a widget, which needs a kernel: a notebook shows its content next to it.
    """
    site = next(path for path in map(Path, sys.path) if path.name == "site-packages")
    places = {str(site): "site-packages", str(folder): ".", str(ROOT): ".", sys.prefix: ".venv", str(Path.home()): "~"}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        text = json.dumps([output for output in map(_without_widget, cell.outputs) if output])
        for place, instead in sorted(places.items(), key=lambda pair: -len(pair[0])):
            text = re.sub(rf"{re.escape(place)}(?=[/\s\"'.,:;)\\]|$)", instead, text)
        text = text.replace(getpass.getuser() + "@", "…")
        text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "…", text)  # a short name is a part of many a word
        cell.outputs = [nbformat.from_dict(output) for output in json.loads(text)]
    return notebook


def _without_widget(output: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """An output without its widget, and without a result's fields as Python spells them; None where nothing is left."""
    if "data" not in output:
        return output
    data = dict(output["data"])
    widget = data.pop("application/vnd.jupyter.widget-view+json", None)
    if {"text/html", "text/markdown", "image/svg+xml"} & set(data) or widget:
        data.pop("text/plain", None)
    return {**output, "data": data} if data else None


def main(chosen: Sequence[str]) -> int:
    """Execute and write. Exit code 1 where a notebook takes longer than it may. `--address`: only links and install cells."""
    slow = []
    for source in sources([word for word in chosen if word != "--address"]):
        address(source)
        if "--address" in chosen:
            continue
        notebook = read(source)
        with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
            took = execute(notebook, Path(folder))
            nbformat.write(tidied(notebook, Path(folder)), source.with_suffix(".ipynb"))
        print(f"{source.stem}: {took:.0f} s, {len(claims(notebook))} claims", flush=True)
        slow += [source.stem] if took > LIMIT else []
    if slow:
        print(f"longer than {LIMIT} s: {', '.join(slow)}", file=sys.stderr)
    return bool(slow)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
