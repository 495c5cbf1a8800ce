# make demo    trains one model under six strategies, two processes each, and prints one table
# make test    make check, then every test that this machine can run
# make grid    hundreds of runs and their forecasts, in hours; it continues where it was stopped. make test repeats a sample
# make check   style, types, layers, words, budgets of code lines, the site
# make docs    builds the site into site/, strictly. Its tables of executed runs: make matrix, make cards, make choose;
#              some: make cards RESULTS="llama qwen3". What is there for the installed versions is not run again
# make schemas the JSON Schemas of forecast, plan and doctor
# make dist    wheel and sdist into dist/, each installed into a fresh environment and imported
# make lower-bounds   installs the lowest versions that pyproject.toml declares into a fresh environment, and trains there
# make notebooks    executes notebooks/*.py into the .ipynb files, with their outputs; some: make notebooks NOTEBOOKS="01 02"
# make screenshots   make the pictures of README: JupyterLab in the system's Chromium
#
# Each checks first for the system packages that it needs (.ci/system-packages), then makes .venv, if it is not there or not current.

PYTHON ?= python3
# Short rows: weights, gradients and moments outweigh the activations, as in large models. zero3 keeps no module gathered: its default is
# a billion elements, which is all of a small model.
DEMO ?= --sharding ddp,zero1,zero2,zero3,fsdp,fsdp_grad_op --processes 2 --steps 20 --seq-len 64 --micro-batch 2 --live-elements 1
PYTEST ?=
# Much of a run of several ranks is one process that imports: two files of such tests at once keep two cores busy.
RUNNERS ?= 2
NOTEBOOKS ?=
RESULTS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.PHONY: demo test grid check style docs matrix cards choose schemas dist lower-bounds notebooks screenshots system-packages
BIN := .venv/bin

# DeepSpeed looks for ninja on the path.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# pip leaves byte-compiling to the first import (that halves its work), so that import must be allowed to write.
unexport PYTHONDONTWRITEBYTECODE

demo: .venv/.installed
	@mkdir -p runs
	$(BIN)/toolkit compare $(DEMO) > runs/demo.log || { cat runs/demo.log; exit 1; }
	@sed -n '/^Highest bytes of a rank/,$$p' runs/demo.log; echo "What each run printed: runs/demo.log"

# One reads the code and the other builds the site: each keeps one core busy.
check: .venv/.installed
	$(MAKE) --no-print-directory -j2 style docs

style: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	.ci/check-words
	$(BIN)/python .ci/check-size

docs: .venv/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

matrix cards choose: .venv/.installed
	$(BIN)/python docs/results.py $@ $(RESULTS)

schemas: .venv/.installed
	$(BIN)/python docs/schemas.py

dist: .venv/.installed
	rm -rf dist
	$(BIN)/python .ci/build-dist dist

lower-bounds: .venv/.installed
	$(BIN)/python .ci/lower-bounds

# A run that benchmarks/results holds for these versions and this machine is not repeated; each row has its commit.
grid: .venv/.installed
	$(BIN)/python benchmarks/forecast_accuracy.py --recent --runs 28
	$(BIN)/python benchmarks/forecast_accuracy.py --adapters qlora8 --runs 20
	$(BIN)/python benchmarks/forecast_accuracy.py --runs 300
	$(BIN)/python benchmarks/meshes.py
	$(BIN)/python benchmarks/kill.py --meshes
	$(BIN)/python benchmarks/rehearsals.py
	for degrees in tp=2 pp=2 cp=2,sharding=ddp ep=2,sharding=fsdp; do $(BIN)/python benchmarks/certificates.py --degrees $$degrees || exit 1; done
	$(BIN)/python benchmarks/load_peak.py
	$(BIN)/python benchmarks/script_exit.py
	$(BIN)/python benchmarks/answers.py
	$(BIN)/python notebooks/execute_twice.py
	TOOLKIT_GRID=1 $(BIN)/pytest -s tests/dist/test_site_commands_dist.py

notebooks: .venv/.installed
	$(BIN)/python notebooks/execute.py $(NOTEBOOKS)

screenshots: .venv/.installed
	$(BIN)/python tests/browser/screenshots.py

test: check
	@select=(); rest=; \
	if ! nvidia-smi -L 2>/dev/null | grep '^GPU' >/dev/null; then \
	    select=(-m 'not gpu'); rest=' and not gpu'; echo "No NVIDIA GPU here: tests marked gpu are left out."; \
	elif ! $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	    select=(-m 'not gpu'); rest=' and not gpu'; echo "This torch cannot use the NVIDIA GPU: tests marked gpu are left out."; \
	fi; \
	set -x; \
	$(if $(PYTEST),$(BIN)/pytest "$${select[@]}" $(PYTEST), \
	    $(BIN)/pytest -m 'not (dist or slow or browser or gpu)' --numprocesses logical --maxprocesses 4 --dist worksteal; \
	    $(BIN)/pytest -m "(dist or slow or browser or gpu)$$rest" --numprocesses $(RUNNERS) --dist loadfile --no-loadscope-reorder)

system-packages:
	@PYTHON='$(PYTHON)' .ci/system-packages $(MAKECMDGOALS)

.venv/.installed: pyproject.toml constraints.txt | system-packages
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --constraint constraints.txt pip
	$(BIN)/python -m pip install --no-compile --build-constraint constraints.txt --constraint constraints.txt --editable '.[all,docs,test]'
	touch $@
