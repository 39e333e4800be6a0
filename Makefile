# make demo and make test are all that a fresh machine needs: they make a virtual environment and install pinned versions into it.
# PYTHON is the interpreter the environment is made from; VENV is where it goes; WORKERS is how many processes share make test.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Subprocesses (torchrun, spawned ranks) find both packages without their being installed; nothing asks a hub.
export PYTHONPATH := $(CURDIR):$(CURDIR)/compat$(if $(PYTHONPATH),:$(PYTHONPATH))
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help demo real test test-avx2 test-system test-full lint format docs venv dev colossalai ray install gpu-check clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo       SFT, a reward model, PPO, from nothing, in minutes on two cores; result in outputs/demo'
	@echo 'make real       a chat model of 135 million parameters learns to add, with two cores in a quarter of an hour; result in outputs/real'
	@echo 'make test       lint and the tests of the library, about ten minutes on two cores'
	@echo 'make test-avx2  those of them that compute in 16 bits, as on a processor with AVX2 and no instructions of 16 bits'
	@echo 'make test-system  launchers, Ray, kills, capacity, layouts, ColossalAI: as long again'
	@echo 'make test-vllm  what generates with vLLM, on vLLM itself on a CPU, in an environment of its own: two minutes, after an install of 2 GB'
	@echo 'make test-full  all of these and the slow tests'
	@echo 'make fixed-runs BASE=<commit>  short runs of every kind with the code of BASE and with this: equal to the bit'
	@echo 'make test-isa   the tests of make test under older instruction sets; ISA=avx2 ISA_TESTS="tests/nn tests/rollout"'
	@echo 'make test-versions  the tests of make test with the lowest and the newest versions that setup.py allows; TEST_VERSIONS=lowest'
	@echo 'make lint       ruff and mypy'
	@echo 'make format     what ruff can mend'
	@echo 'make numbers    numbers of README and guides, and pages of results, again from the results; CHECK=1 compares only'
	@echo 'make docs       the docs as a site, in build/docs/index.html; a link that leads nowhere is an error'
	@echo 'make install    the package itself and that of other systems, both editable, into $(VENV)'
	@echo 'make gpu-check  on one GPU, under 9 minutes, with PYTHON as it is: tests, benchmarks, one JSON file (docs/gpu.md)'
	@echo 'make clean      caches and $(VENV)'

demo: venv
	$(BIN)/python examples/demo.py

real: $(VENV)/.stamp-real
	$(BIN)/python examples/real_model/additions.py $(REAL_ARGS)

# One thread per process: tests start processes of their own, and results do not depend on the number of cores.
PYTEST := env OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# vLLM pins packages of its own, so it has an environment of its own, with the CPU build of torch and without what is for GPUs.
VLLM_VENV := .venv-vllm
.PHONY: test-vllm
test-vllm: $(VLLM_VENV)/.stamp-vllm
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/real_vllm -m 'not gpu' -p no:cacheprovider $(PYTEST_ARGS)

# Halves of the list go to the workers, which keeps the fixtures of a file together; whoever is done first helps the other.
test: lint colossalai ray
	$(PYTEST) -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# Files with a dtype of 16 bits in them, and all of tests/strategies.
test-avx2:
	@$(MAKE) --no-print-directory test-isa ISA=avx2 \
	  ISA_TESTS="tests/strategies $$(grep -rlE 'bf16|bfloat16|fp16|float16|16_bits' tests compat/tests --include='test_*.py' | grep -v ^tests/strategies/ | tr '\n' ' ')"

# A file's tests stay with one worker, for they share a cluster or a run.
SYSTEM := $(PYTEST) -n $(WORKERS) --dist loadfile
test-system: dev colossalai ray $(VENV)/.stamp-docs
	$(SYSTEM) -m 'system and not slow and not gpu' $(PYTEST_ARGS)

test-full: test $(VENV)/.stamp-docs
	$(SYSTEM) -m '(system or slow) and not gpu' $(PYTEST_ARGS)

# The recording is made from a temporary checkout of BASE, by the runs of this one; the comparison is with the working tree.
.PHONY: fixed-runs
BASE ?= HEAD
fixed-runs: dev
	@set -e; folder=$$(mktemp -d); trap 'git worktree remove --force "$$folder/base" 2>/dev/null; rm -rf "$$folder"' EXIT; \
	git worktree add --quiet --detach "$$folder/base" '$(BASE)'; \
	$(BIN)/python tests/fixed_runs/record.py --root "$$folder/base" --out "$$folder/base.json" $(FIXED_RUNS_ARGS); \
	$(BIN)/python tests/fixed_runs/record.py --against "$$folder/base.json" $(FIXED_RUNS_ARGS)

# Which kernels torch and oneDNN choose depends on the processor, and what the library takes it for is another matter, which a test says or
# CHATGPT_PROCESSOR. ISA: some of default (no AVX2), avx2 (and no instructions of 16 bits), onednn (AVX2 at most in oneDNN). ISA_TESTS: files or
# folders.
.PHONY: test-isa
ISA ?= default avx2 onednn
ISA_TESTS ?= tests compat/tests
ISA_default := ATEN_CPU_CAPABILITY=default
ISA_avx2 := CHATGPT_PROCESSOR=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
ISA_onednn := ONEDNN_MAX_CPU_ISA=AVX2
test-isa: dev colossalai ray
	@failed=; $(foreach isa,$(ISA),echo '$(ISA_$(isa))'; \
	  $(ISA_$(isa)) $(PYTEST) -q -n $(WORKERS) --dist worksteal $(PYTEST_ARGS) $(ISA_TESTS) || failed="$$failed $(isa)"; \
	) test -z "$$failed" || { echo "failed under$$failed"; exit 1; }

# Each in an environment of its own, .venv-lowest and .venv-newest; a table at the end. TEST_VERSIONS=lowest takes one.
.PHONY: test-versions
TEST_VERSIONS ?= lowest newest
PYTHON_LOWEST ?= $(PYTHON)
PYTHON_NEWEST ?= $(shell python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null || echo $(PYTHON))
test-versions:
	$(PYTHON) tests/versions/run.py $(TEST_VERSIONS) --lowest-python $(PYTHON_LOWEST) --newest-python $(PYTHON_NEWEST) \
	  --workers $(WORKERS) -- $(PYTEST_ARGS)

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Warnings are errors: a link without its target, a page that the contents do not name, a docstring that cannot be read.
docs: $(VENV)/.stamp-docs
	$(BIN)/python -m sphinx -b html -W --keep-going -q -c docs . build/docs
	@echo 'written: build/docs/index.html'

# Measures nothing. CHECK=1 changes nothing, and a number that differs is an error.
.PHONY: numbers
numbers: venv
	$(BIN)/python benchmarks/quoted.py $(if $(CHECK),--check)

# Uses PYTHON as it is, for a CUDA machine has a torch of its own. WHEELS: a folder with wheels of what else it lacks (used for this run
# only). GPU_ARGS: flags of the script, such as --parts or --out.
gpu-check:
	$(PYTHON) benchmarks/gpu_check.py $(if $(WHEELS),--wheels '$(WHEELS)') $(GPU_ARGS)

install: venv
	$(PIP) --no-deps --editable . --editable compat

# ---------------------------------------------------------------- environment: one stamp per requirements file

venv: $(VENV)/.stamp-core
dev: $(VENV)/.stamp-dev $(VENV)/.stamp-compat
colossalai: $(VENV)/.stamp-colossalai
ray: $(VENV)/.stamp-ray

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, PYTHON is %d.%d" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

# torch comes first and pinned: a package that asks for any torch would bring the newest. Its build is the one that the machine can use:
# CUDA where nvidia-smi shows a GPU, else CPU; TORCH_INDEX names another index.
$(VENV)/.stamp-core: requirements.txt | $(BIN)/python
	$(BIN)/python install_torch.py
	$(PIP) -r requirements.txt
	@touch $@

# Reads the model's file.
$(VENV)/.stamp-real: requirements-dev.txt $(VENV)/.stamp-core
	$(PIP) --no-deps $$(grep ^gguf== requirements-dev.txt)
	@touch $@

# The metadata of trackio and OpenEnv asks for Pillow < 13, hence --no-deps.
$(VENV)/.stamp-dev: requirements-dev.txt requirements-openenv.txt $(VENV)/.stamp-core
	$(PIP) -r requirements-dev.txt
	$(PIP) --no-deps -r requirements-openenv.txt
	@touch $@

# What makes `chatgpt-rlhf compat` a word of the command is the metadata of that package.
$(VENV)/.stamp-compat: compat/pyproject.toml $(VENV)/.stamp-core
	$(PIP) --no-deps --no-build-isolation --editable compat
	@touch $@

# ColossalAI's metadata asks for a torch and a transformers of long ago, hence --no-deps; it runs with these (docs/strategies.md).
$(VENV)/.stamp-colossalai: requirements-colossalai.txt $(VENV)/.stamp-core
	$(PIP) --no-deps -r requirements-colossalai.txt
	@touch $@

$(VENV)/.stamp-ray: requirements-ray.txt $(VENV)/.stamp-core
	$(PIP) -r requirements-ray.txt
	@touch $@

$(VLLM_VENV)/.stamp-vllm: requirements-vllm.txt requirements.txt
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_VENV)/bin/python install_torch.py --cpu
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm.txt
	@touch $@

$(VENV)/.stamp-docs: requirements-docs.txt $(VENV)/.stamp-core
	$(PIP) -r requirements-docs.txt
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
