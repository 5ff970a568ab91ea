# `make run` sets up and runs the main job; `make test` sets up and passes the tests. Plain pip and venv.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
GPU := $(wildcard /dev/nvidiactl)
export WANDB_MODE ?= offline
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup run test slow soak bench check docs clean

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml requirements/cpu.txt requirements/cpu-nodeps.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade pip
ifdef GPU
	$(BIN)/python -m pip install -qq -e ".[vllm,dev]"
else
	$(BIN)/python -m pip install -qq "torch>=2.13,<2.14"
	$(BIN)/python -m pip install -qq -e ".[dev]" -r requirements/cpu.txt
	$(BIN)/python -m pip install -qq --no-deps -r requirements/cpu-nodeps.txt
endif
	touch $@

run: setup
	$(BIN)/trinity-data run pipelines/gsm8k.yaml

test: setup
	$(BIN)/python -m pytest -q

slow: setup
	$(BIN)/python -m pytest -q -m slow

# kill -9 of a writing process, and of whole runs, at random moments
KILLS ?= 1000
soak: setup
	$(BIN)/python -m tests.store.soak --kills $(KILLS)
	$(BIN)/python -m tests.launch.kill_loop --kills $(KILLS)

bench: setup
	$(BIN)/python -m tests.benchmarks

docs: setup
	$(BIN)/python -m pip install -qq -e ".[docs]"
	$(BIN)/zensical build --strict --clean

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist site
