# Everything runs in a virtual environment made here; delete .venv to start over.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check docs campaign clean

demo: $(VENV)/installed
	$(BIN)/penstock run examples/cantilever.yaml

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q -n 2 --dist loadscope --no-loadscope-reorder

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# The site, into docs/_build: every warning is an error, and the scripts of the gallery run unless SPHINX="-D plot_gallery=0".
docs: $(VENV)/installed-docs
	$(BIN)/python -m sphinx -W --keep-going -q -j 2 $(SPHINX) -b html docs docs/_build
	@echo "open docs/_build/index.html"

# Attacks for ten minutes: damaged files, faults, random systems, killed runs. Not part of the tests.
campaign: $(VENV)/installed-dev
	$(BIN)/python tests/campaign/run.py

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("penstock needs Python 3.11 or later") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/installed-dev: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@ $(VENV)/installed

$(VENV)/installed-docs: $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info results docs/_build docs/generated
