# Everything here works on a fresh machine: a target makes the environment that it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test quick lint bench clean

demo: $(VENV)/.demo
	$(BIN)/python -m paged_jax.generate --prompt "It is a truth universally acknowledged" --max-tokens 100

test: $(VENV)/.test lint
	$(BIN)/python -m pytest

quick: $(VENV)/.test
	$(BIN)/python -m pytest -m "not slow"

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/allocator.py
	$(BIN)/python benchmarks/generate.py

clean:
	rm -rf $(VENV) build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

# Tests that compare with transformers skip unless the extra "peers" is installed too; it is large.
$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@ $(VENV)/.demo

$(VENV)/.bench: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --editable ".[test,peers,bench]"
	touch $@
