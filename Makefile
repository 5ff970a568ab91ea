# `make run` sets up and runs the main job; `make test` sets up and passes the tests. Plain pip and venv.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
GPU := $(wildcard /dev/nvidiactl)
LOCK ?= requirements/lock.txt
export WANDB_MODE ?= offline
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup lock run test slow gpu soak bench check docs data_juicer clean

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml requirements/cpu.txt requirements/cpu-nodeps.txt $(LOCK)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade pip
ifdef GPU
	$(BIN)/python -m pip install -qq -e ".[vllm,dev]"
else
	$(BIN)/python -m pip install -qq -c $(LOCK) "torch>=2.13,<2.14"
	$(BIN)/python -m pip install -qq -c $(LOCK) -e ".[dev]" -r requirements/cpu.txt
	$(BIN)/python -m pip install -qq --no-deps -r requirements/cpu-nodeps.txt
endif
	touch $@

# the newest versions that pyproject.toml allows, as a set-up for a CPU without the lock installs them
lock:
	rm -rf build/lock
	$(MAKE) setup VENV=build/lock LOCK=/dev/null
	echo "# The versions of a set-up for a CPU. \`make lock\` writes them, \`make setup\` installs them." > $(LOCK)
	build/lock/bin/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' >> $(LOCK)

run: setup
	$(BIN)/trinity-data run pipelines/gsm8k.yaml

# half of the time a test waits for processes; a file stays whole, because its tests share what they start
WORKERS ?= 2
test: setup
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder

slow: setup
	$(BIN)/python -m pytest -q -m "slow and not gpu"

# on a machine with CUDA devices
gpu: setup
	$(BIN)/python -m pytest -q -m gpu

# kill -9 of a writing process, and of whole runs, at random times
KILLS ?= 1000
soak: setup
	$(BIN)/python -m tests.store.soak --kills $(KILLS)
	$(BIN)/python -m tests.launch.kill_loop --kills $(KILLS)

bench: setup
	$(BIN)/python -m tests.benchmarks

# what each operator of the installed Data-Juicer does here, which takes minutes, and the page about it
data_juicer: setup
	$(BIN)/python -m trinity_operators.data_juicer.survey
	$(BIN)/python -m tests.operators.data_juicer_observation
	$(BIN)/python -m trinity_operators.data_juicer.catalogue > docs/reference/data_juicer.md

docs: setup
	$(BIN)/python -m pip install -qq -e ".[docs]"
	$(BIN)/zensical build --strict --clean

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell docs explorer operators pipelines trainer trinity_data *.md Makefile pyproject.toml

clean:
	rm -rf $(VENV) build dist site
