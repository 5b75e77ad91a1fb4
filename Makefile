# make train | test | test-slow | check | check-install | bench: each sets up what it needs in .venv, then does its job.
PYTHON ?= python3
BIN := .venv/bin
GAME ?= pong
FLAGS ?=
# the presets end at a score of Pong
TARGET := $(if $(filter pong,$(GAME)),,--run.target-score None)

.PHONY: setup setup-bench train test test-slow check check-install format bench clean

setup: .venv/.ready
setup-bench: .venv/.ready-bench

.venv/.ready: pyproject.toml constraints.txt setup.py phalanx/envs/frames.c
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	rm -rf build phalanx/envs/_frames*.so  # an old one must not stand in for what does not compile
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,cluster,environments]"
	touch $@

.venv/.ready-bench: .venv/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]" || echo "some peers did not install; the benchmark reports them"
	touch $@

train: setup
	$(BIN)/phalanx train default --env.game $(GAME) $(TARGET) $(FLAGS)

test: setup
	$(BIN)/python -m pytest

test-slow: setup
	$(BIN)/python -m pytest -m slow --timeout 1800

check: setup
	$(BIN)/ruff format --check phalanx tests benchmarks examples
	$(BIN)/ruff check phalanx tests benchmarks examples
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format phalanx tests benchmarks examples
	$(BIN)/ruff check --fix phalanx tests benchmarks examples

check-install: setup
	$(BIN)/python benchmarks/install_check.py

bench: setup-bench
	$(BIN)/python benchmarks/peers.py

clean:
	rm -rf .venv build *.egg-info phalanx/envs/*.so .pytest_cache .mypy_cache .ruff_cache
