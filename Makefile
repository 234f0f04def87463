# make book | lab | test | fuzz | execute | bind | repository | bench | clean
#
# PYTHON       the interpreter that .venv is made with (3.11 to 3.13)
# TORCH_INDEX  optional: the index that torch is taken from, for PyTorch's CPU build
# SECONDS      how long make fuzz draws cases
# SEED         which cases it draws

PYTHON ?= python3
TORCH_INDEX ?=
SECONDS ?= 60
SEED ?= 0
BIN := .venv/bin
PY := $(BIN)/python
# No prompt, no chatter: what pip prints is what went wrong.
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

.PHONY: help book lab weights test fuzz execute bind repository bench clean
.DEFAULT_GOAL := help

help:
	@echo "make book        install the book's tools and build the HTML (no torch)"
	@echo "make lab         install everything and open the chapters in JupyterLab"
	@echo "make test        everything that CI runs"
	@echo "make fuzz        random models, caches and schedules against plain models"
	@echo "make execute     re-run the chapters in place and normalize them"
	@echo "make bind        rewrite tests/numbers.lock; read its diff"
	@echo "make repository  carry the repository URL from pyproject.toml to where it is used"
	@echo "make bench       benchmarks: tables and one JSON line each"
	@echo "make clean       remove what was built (.venv stays)"

$(PY):
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) \
	    else "Python 3.11 to 3.13 is needed, this is %d.%d; set PYTHON=python3.12, say" % v)'
	$(PYTHON) -m venv .venv

# The book's tools alone, at the versions that requirements.txt pins.
.venv/.book: requirements.txt pyproject.toml | $(PY)
	$(PIP) --constraint requirements.txt jupyter-book
	$(PIP) --no-deps --editable .
	@touch $@

# Everything: to run, test and change the chapters.
.venv/.all: requirements.txt pyproject.toml | $(PY)
	$(if $(TORCH_INDEX),$(PIP) --index-url $(TORCH_INDEX) $$(grep '^torch==' requirements.txt))
	$(PIP) --requirement requirements.txt
	$(PIP) --no-deps --editable .
	@touch $@ .venv/.book

book: .venv/.book
	@$(PY) -m tools.build_html

lab: .venv/.all
	$(BIN)/jupyter lab book

# Fetched before the chapters run: a progress bar is no output of a chapter.
weights: .venv/.all
	@$(PY) -m kvbook.model.download > /dev/null

test: weights
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PY) -m pytest -n 2 --dist loadfile
	$(PY) -m tools.notebooks test

fuzz: .venv/.all
	$(PY) -m tests.fuzz --seconds $(SECONDS) --seed $(SEED)

execute: weights
	$(PY) -m tools.notebooks execute

bind: .venv/.all
	$(PY) -m tools.numbers bind

repository: .venv/.all
	$(PY) -m tools.repository

bench: .venv/.all
	$(PY) -m benchmarks.decode
	$(PY) -m benchmarks.generation
	$(PY) -m benchmarks.caches
	$(PY) -m benchmarks.blocks
	$(PY) -m benchmarks.engine

clean:
	rm -rf _build build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
