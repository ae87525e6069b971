# Every target sets up what it needs: a virtual environment in $(VENV), made again when what it is made from changes.
# `make help` lists the targets and the variables.

PYTHON ?= python3
# The torch of a machine without a GPU, of constraints/torch-*.txt. Another than the first has an environment of its own.
FIRST_TORCH := 2.13.0
NEWEST_TORCH := 2.15.0
TORCH ?= $(FIRST_TORCH)
VENV ?= .venv$(if $(filter-out $(FIRST_TORCH),$(TORCH)),-$(TORCH))
# Passed to `python -m venv`; --system-site-packages uses the torch that the machine already has.
VENV_ARGS ?=
# Passed to `pip install`, e.g. --no-build-isolation where no package index can be reached.
PIP_ARGS ?=
# An extra package index for torch. Empty: pip's own configuration decides.
TORCH_INDEX ?=
NPROC ?= 2
# Iterations of `make train`; at least 41, because the learning rate warms up for 40.
TRAIN_ITERS ?= 600
# Passed to examples/pretrain_gpt.py. These train a byte-level GPT to under 2 nats per byte in about three minutes on 2
# CPU cores, on the source code of the Python standard library (--data-path names another text).
TRAIN_ARGS ?= --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params \
	--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
	--micro-batch-size 8 --global-batch-size 16 --train-iters $(TRAIN_ITERS) \
	--lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-warmup-iters 40 --weight-decay 0.1 --adam-beta2 0.95 \
	--seed 1234 --log-interval 50 --eval-iters 10 --save runs/gpt --save-interval 300
# What `make test` runs, in how many processes (each with ranks of its own, which often wait), and flags for pytest.
TESTS ?= tests/unit tests/functional
TEST_JOBS ?= 3
TEST_ARGS ?=
# A rank is a process here, and a thread pool in each would only fight over the cores.
export OMP_NUM_THREADS ?= 1
# Each process of a run imports the tests, and most of their files take longer to compile than to run.
unexport PYTHONDONTWRITEBYTECODE

# Not test_triton.py, all of whose tests look at values.
GPU_TESTS := tests/functional/test_devices.py tests/functional/test_gpu_ranks.py

# A file's tests share fixtures and runs, so they stay in one process; tests/conftest.py says which files begin.
PARALLEL := $(if $(filter-out 0 1,$(TEST_JOBS)),--numprocesses $(TEST_JOBS) --dist loadfile --no-loadscope-reorder)

BIN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
CHECKED := benchmarks dbuffer kernels megatron_fsdp examples tests setup.py

HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
# With a GPU, torch must match the driver, so its version is the machine's own affair unless it is asked for.
IS_ASKED := $(filter command environment,$(firstword $(origin TORCH)))
CONSTRAINTS := constraints/tools.txt $(if $(HAS_GPU),,constraints/cpu.txt) \
	$(if $(HAS_GPU),$(if $(IS_ASKED),constraints/torch-$(TORCH).txt),constraints/torch-$(TORCH).txt)

KNOWN_TORCH := $(patsubst constraints/torch-%.txt,%,$(sort $(wildcard constraints/torch-*.txt)))
$(if $(filter $(TORCH),$(KNOWN_TORCH)),,$(error TORCH=$(TORCH) is none of the versions in constraints/: $(KNOWN_TORCH)))

.DEFAULT_GOAL := help
.PHONY: help train test test-nightly test-integrations test-docs test-faults test-gpu test-nullcuda bench docs check format clean

help: ## List targets and variables.
	@echo "Targets:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "Variables:"
	@echo "  PYTHON=python3.12                  the Python to use, 3.10 or newer"
	@echo "  VENV_ARGS=--system-site-packages   use the torch that PYTHON already has"
	@echo "  TORCH=$(NEWEST_TORCH)                       another torch that is tested, in an environment of its own:"
	@echo "                                     $(KNOWN_TORCH)"
	@echo "  TORCH_INDEX=URL                    where to get torch; on a machine without a GPU"
	@echo "                                     https://download.pytorch.org/whl/cpu saves gigabytes"
	@echo "  NPROC=4 TRAIN_ITERS=100            ranks and iterations of make train"
	@echo "  TRAIN_ARGS='--train-iters 10'      its flags, instead of the Makefile's"
	@echo "  TESTS=tests/unit/dbuffer TEST_ARGS='-x -k plan'"
	@echo "                                     tests and pytest flags of make test"
	@echo "  PAGES=docs/muon.md                 pages of make test-docs; all of them without"
	@echo "  TEST_JOBS=1                        processes of make test; 1 to see output and use a debugger"
	@echo "PYTHON and VENV_ARGS count when the environment is made: run make clean before changing them."

train: $(STAMP) ## Train a small GPT with sharded parameters, gradients and optimizer state.
	$(BIN) examples/start_ranks.py --standalone --nproc-per-node $(NPROC) examples/pretrain_gpt.py $(TRAIN_ARGS)

test: $(STAMP) ## Run the unit and functional tests that need no GPU; what is whole in test-nightly is a part here.
	$(BIN) -m pytest $(TESTS) -m "not gpu and not slow" $(PARALLEL) --durations=15 $(TEST_ARGS)

test-nightly: $(STAMP) ## Run what `make test` leaves out: whole grids, kills, many more uses, the newest torch.
	$(BIN) -m pytest tests/unit tests/functional -m "slow and not gpu" $(PARALLEL) --durations=15 $(TEST_ARGS)
	$(BIN) -m pytest tests/faults/test_faults.py --durations=15 $(TEST_ARGS)
	RANDOM_USE=2000 $(BIN) -m pytest tests/functional/random_use/test_random_use.py --durations=15 $(TEST_ARGS)
	$(if $(filter $(FIRST_TORCH),$(TORCH)),$(MAKE) test TORCH=$(NEWEST_TORCH))
	$(if $(filter $(FIRST_TORCH),$(TORCH)),$(MAKE) test-nullcuda)

test-integrations: $(STAMP) ## Run the tests with Hugging Face, torchtitan, megatron-core, vLLM, ..., which it installs.
	$(BIN) -m pip install -qq --disable-pip-version-check $(PIP_ARGS) $(addprefix --constraint ,$(CONSTRAINTS) constraints/integrations.txt) --editable '.[integrations]'
	$(BIN) -m pip install -qq --disable-pip-version-check $(PIP_ARGS) --no-deps --upgrade --target build/inference --requirement constraints/inference.txt
	$(BIN) -m pytest tests/integration --durations=15 $(TEST_ARGS)

test-docs: $(STAMP) ## Run the code of README, CONTRIBUTING and docs, block by block, in a copy.
	$(BIN) -m tests.docs $(PAGES)

docs: $(STAMP) ## Build the site of the documentation, with the API reference, in build/site: about a minute.
	$(BIN) -m pip install -qq --disable-pip-version-check $(PIP_ARGS) $(addprefix --constraint ,$(CONSTRAINTS) constraints/docs.txt) --editable '.[docs]'
	$(BIN) docs/build_site.py

test-faults: $(STAMP) ## Kill, stall and restart training jobs in every phase, the long way.
	$(BIN) -m pytest tests/faults --durations=15 $(TEST_ARGS)

test-nullcuda: ## Run the GPU's code without a GPU: torch's CUDA build over a driver that keeps a log (gcc, Linux, 3 GB).
	null=$$($(PYTHON) tests/nullcuda/build.py) && export PYTHONPATH=$(CURDIR):$(CURDIR)/kernels:$(CURDIR)/examples && \
	NULLCUDA_DEVICES=2 $$null -m pytest -p tests.nullcuda.no_values $(GPU_TESTS) -m gpu --durations=5 $(TEST_ARGS) && \
	$$null -m pytest tests/nullcuda --durations=15 $(TEST_ARGS)

bench: $(STAMP) ## List the benches; run one with BENCH=planner.
	$(BIN) -m benchmarks $(or $(BENCH),--help)

test-gpu: $(STAMP) ## Run the tests that need a GPU.
	$(BIN) -m pytest tests -m gpu --durations=15 $(TEST_ARGS)

check: $(STAMP) ## Check format, lint, types and architecture.
	$(BIN) -m ruff format --check $(CHECKED)
	$(BIN) -m ruff check $(CHECKED)
	$(BIN) -m mypy
	$(BIN) -m pytest -q tests/unit/test_architecture.py

format: $(STAMP) ## Format the code and sort its imports.
	$(BIN) -m ruff format $(CHECKED)
	$(BIN) -m ruff check --fix $(CHECKED)

clean: ## Remove the environment, caches and build leftovers.
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): setup.py pyproject.toml $(CONSTRAINTS)
	@command -v $(PYTHON) >/dev/null || { echo "error: PYTHON=$(PYTHON) is not a command; name a Python >= 3.10, as in: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("error: $(PYTHON) is Python %d.%d, wanted >= 3.10; name a newer one, as in: make PYTHON=python3.12" % sys.version_info[:2])'
	@test -z "$(HAS_GPU)" || test -n "$(VENV_ARGS)" || $(PYTHON) -c 'import importlib.util as u; u.find_spec("torch") and print("note: $(PYTHON) has torch; make VENV_ARGS=--system-site-packages would use it instead of installing another")'
	@# A folder whose pip does not run is left over from a set-up that failed.
	@$(BIN) -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV_ARGS) $(VENV); } || { rm -rf $(VENV); echo "error: '$(PYTHON) -m venv' failed (see above); install the venv module (on Debian: apt-get install python3-venv) or name another Python, as in: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing PyTorch and what goes with it into $(VENV)$(if $(HAS_GPU),, without CUDA): minutes, once"
	@# On a terminal pip shows what it fetches, with the time left; elsewhere its lines would bury what follows.
	$(BIN) -m pip install $$(test -t 2 || echo -qq) --disable-pip-version-check $(PIP_ARGS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(addprefix --constraint ,$(CONSTRAINTS)) --editable '.[dev]'
	@touch $@
