# make run   sets up .venv and does the main job
# make test  sets up .venv and runs all tests
CONSTRAINTS ?= constraints.txt
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test test-long lint types docs setup clean
setup: .venv/ready

.venv/ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[torch,dev]'
	touch $@

run: setup
	$(BIN)/torchweave demo

test: setup
	$(BIN)/python -m pytest -m "not long"

test-long: setup
	$(BIN)/python -m pytest -m long

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

docs: setup
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf .venv docs/_build
