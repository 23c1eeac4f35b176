# Each target sets up .venv by itself, once: see tools/setup_env.py.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
SEED ?= 1
SEEDS ?= 1
TESTS ?= tests
ARGS ?=
WORKERS ?= 3
MARKED ?= not slow

PY := .venv/bin/python
RUN_ENV := .venv/.ready-run
DEV_ENV := .venv/.ready-dev
CODE := hybridflow recipes tests benchmarks tools
CUDA_SUITES := $(patsubst %,tests/contracts/test_%.py,train_engine engine_state lora_training lora_any_model engine_splits logits any_model megatron_families) tests/integration/test_failed_transitions.py
CUDA_SUITES += $(patsubst %,tests/integration/test_expert_generation.py::test_experts_lie_whole_on_ranks[%-1-2],mixtral qwen2_moe)
BENCHMARKS := controller iteration generation transition reallocation packing train_step rewards planner planner_findings planner_truth loops fault_simulation checkpoints streams elastic timesharing environments throughput calls generation_sizes

# One thread per process: a run is many processes, and the models that fit a CPU are small.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

PYTEST = -m pytest -q --durations=15 --timeout=300 --numprocesses=$(WORKERS) --dist=loadgroup

.PHONY: help quickstart recipes test test-cuda test-cuda-ranks test-all lint format docs bench paper clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart [SEED=1]    PPO on a small model, start to finish, on this machine"
	@echo "make recipes [SEEDS='1 2 3']  every recipe on that model, and a table of what each reached"
	@echo "make test [TESTS=path] [WORKERS=3] [ARGS=...]   the tests (pytest) that are not slow, on three processes"
	@echo "make test-cuda [TESTS=path]   tests/gpu on a GPU, or on emulated CUDA (2.1 GB, needs g++)"
	@echo "make test-cuda-ranks        the contract suites of engines on CUDA, on up to six devices"
	@echo "make test-all               all of them"
	@echo "make lint                   ruff and pyright"
	@echo "make format                 let ruff rewrite what it can"
	@echo "make docs                   the documentation as a site, in build/site"
	@echo "make bench                  the benchmark programs, one JSON line each"
	@echo "make paper                  the papers' figures that this machine can make, beside predictions"
	@echo "make clean                  remove the environment and caches; runs/ stays"

$(RUN_ENV): pyproject.toml tools/setup_env.py
	@$(PYTHON) tools/setup_env.py run

$(DEV_ENV): pyproject.toml tools/setup_env.py
	@$(PYTHON) tools/setup_env.py dev

quickstart: $(RUN_ENV)
	$(PY) recipes/ppo.py seed=$(SEED) $(ARGS)

recipes: $(RUN_ENV)
	@$(PY) recipes/run_all.py $(SEEDS) $(ARGS)

test: $(DEV_ENV)
	$(PY) $(PYTEST) $(if $(filter tests,$(TESTS)),-m "$(MARKED)") $(TESTS) $(ARGS)

test-cuda: TESTS = tests/gpu
test-cuda: $(DEV_ENV)
	$(PY) -m tests.emulated_cuda $(PYTEST) $(TESTS) $(ARGS)

# 1 to 6 ranks, each on an emulated device of its own
test-cuda-ranks: TESTS = $(CUDA_SUITES)
test-cuda-ranks: $(DEV_ENV)
	TEST_DEVICE=cuda EMULATED_DEVICES=8 $(PY) -m tests.emulated_cuda $(PYTEST) $(TESTS) $(ARGS)

# with the sandbox's tests of bubblewrap, where it is installed (apt-get install bubblewrap)
test-all:
	@command -v bwrap >/dev/null || echo "bwrap is not installed: the tests of programs in bubblewrap are skipped" >&2
	$(MAKE) test MARKED=
	$(MAKE) test-cuda
	$(MAKE) test-cuda-ranks

lint: $(DEV_ENV)
	$(PY) -m ruff check $(CODE)
	$(PY) -m ruff format --check $(CODE)
	$(PY) -m basedpyright --level error

format: $(DEV_ENV)
	$(PY) -m ruff check --fix $(CODE)
	$(PY) -m ruff format $(CODE)

docs: $(DEV_ENV)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

paper: $(RUN_ENV)
	@$(PY) -m benchmarks.paper

bench: $(RUN_ENV)
	@for name in $(BENCHMARKS); do $(PY) -m benchmarks.$$name || exit 1; done

clean:
	rm -rf .venv .cache build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
