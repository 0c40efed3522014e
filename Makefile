# `make` alone lists what there is.  Every target that runs Python makes the environment first.

VENV ?= .venv
PYTHON ?=
ARGS ?=
TESTS ?=
WORKERS ?= 2
BIN := $(VENV)/bin
READY := $(VENV)/.complete

# What another project's shell set-up adds would leak into the environment.
unexport PYTHONHOME PYTHONPATH
# Without stored bytecode every process would compile all modules that it imports, for seconds.
unexport PYTHONDONTWRITEBYTECODE
export PYTHON LOCKED

# Of the same shape, and of the same FLOPs, unless the arguments say which models there are.
DEMO_TWIN := $(if $(filter --twin% --notwin% --resume% --init_from% --scale%,$(ARGS)),,--twin=narrow)

# So long for each model that the first result takes five minutes in all, with the environment.
DEMO_MINUTES := $(if $(filter --minutes% --steps% --resume%,$(ARGS)),,--minutes=0.8)

# An environment whose Python was since removed is made anew.
GONE := $(shell test -x $(BIN)/python || echo FORCE)

# What `make test` runs; BUILD.md has the rule by which tests are marked.
EACH_CONTRACT := --hypothesis-profile=fewer-draws -m 'not slow and not nightly'

# Tests of what a compiler for a chip that is not there makes.
TPU_COMPILES := test_pallas_tpu_compiles.py test_tpu_passes_compile.py test_pallas_tpu_grouped_compiles.py test_splash_compiles.py test_step_compiles.py test_quantized_compiles.py
GPU_COMPILES := test_pallas_hopper_compiles.py test_cudnn_compiles.py test_step_compiles.py test_grouped_compiles.py test_decoding_compiles.py test_pallas_triton_compiles.py test_quantized_compiles.py

# Tests of faults that happen to a run.
FAULT_TESTS := $(addprefix tests/,borders experiments/test_faults.py experiments/test_mirror_runs.py experiments/test_power_cut.py experiments/test_random_kills.py experiments/test_drawn_inputs.py experiments/test_three_processes.py experiments/test_tools_killed.py experiments/test_exhausted_runs.py)

# Tests of code that runs only where an optional package is installed.
OPTIONAL_TESTS := $(addprefix tests/,experiments/test_optional_packages.py experiments/benchmarks/test_step_peers.py monitoring/test_tracker_packages.py interchange/test_architectures.py interchange/test_torch_reader.py interchange/test_generations.py interchange/test_published_tokenizers.py layers/test_frameworks.py examples/test_preference_tuning.py)

.DEFAULT_GOAL := help
.PHONY: help env demo test test-all nightly optional real faults storm mutants aot-tpu aot-gpu aot-rocm bench bench-schedule bench-schedule-gpu chip-report package lint format docs lock clean FORCE

help: ## list the targets
	@echo 'usage: make TARGET [ARGS="--flag=value ..."] [VENV=.venv] [PYTHON=python3.12]'
	@echo
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' Makefile | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

env: $(READY) ## make the environment, or bring it up to date
	@:

$(READY): setup.cfg setup.py pyproject.toml $(GONE)
	@sh launch/make_env.sh $(VENV)

demo: $(READY) ## train a sparse GPT and two dense ones here; ARGS="--help" lists the flags
	@$(BIN)/python -m experiments.gpt13b_sparse $(DEMO_TWIN) $(DEMO_MINUTES) $(ARGS)

test: $(READY) ## run each contract once, in about 25 minutes; TESTS="tests/core/layouts -k layout" runs some
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=10 $(EACH_CONTRACT) $(TESTS)

test-all: $(READY) ## run these tests and the slow ones, which show more instances
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=10 $(TESTS)

nightly: $(READY) ## run the tests that are too long for every day, and new draws of the drawn ones
	$(BIN)/python -m pytest -m 'nightly or hypothesis' --hypothesis-profile=new-draws $(TESTS)

optional: ## run what needs torch, transformers of four releases, wandb, mlflow and others (fetches 4 GB into .venv-optional)
	@sh launch/make_env.sh .venv-optional dev,optional
	@.venv-optional/bin/python tests/interchange/generations.py
	@.venv-optional/bin/python tests/interchange/published_tokenizers.py
	.venv-optional/bin/python -m pytest -n $(WORKERS) --dist worksteal -m '' $(OPTIONAL_TESTS) $(TESTS)
	.venv-optional/bin/python tests/layers/flax_suite.py
	@$(MAKE) real ARGS="--models=smollm2 --short"

real: ## check and time real models beside llama.cpp (fetches 400 MB in .venv-real); ARGS="--short"
	@sh launch/make_env.sh .venv-real dev
	@PYTHONPATH=$(CURDIR) .venv-real/bin/python tests/real/models.py
	PYTHONPATH=$(CURDIR) .venv-real/bin/python tests/real/families.py
	PYTHONPATH=$(CURDIR) .venv-real/bin/python tests/real/run.py $(ARGS)

faults: $(READY) ## every fault test, measured for docs/evidence/surviving.md; ARGS="--kills=200"
	FAULTS=$(CURDIR)/tests/experiments/faults.json $(BIN)/python -m pytest -m "" --hypothesis-profile=new-draws $(FAULT_TESTS) $(TESTS) $(ARGS); \
	ended=$$?; $(BIN)/python tests/experiments/fault_records.py && exit $$ended

storm: $(READY) ## draw combinations of settings and check relations between results; ARGS="--minutes=30 --seed=7"
	@PYTHONPATH=$(CURDIR):$(CURDIR)/tests $(BIN)/python -m storm $(ARGS)

mutants: $(READY) ## apply small faults one by one, and report which tests catch them; ARGS="--only=padding"
	@$(BIN)/python tests/mutation/run.py $(ARGS)

aot-tpu: ## compile each TPU kernel and a step of each chip, v4 to v6e, without one (fetches libtpu: 200 MB in .venv-tpu)
	@sh launch/make_env.sh .venv-tpu dev,aot
	.venv-tpu/bin/python -m pytest -n $(WORKERS) --dist worksteal $(EACH_CONTRACT) $(addprefix tests/core/ops/,$(TPU_COMPILES)) tests/relay/test_compiles.py tests/compile/test_plans_compile.py tests/compile/test_overlaps.py tests/experiments/benchmarks/schedules/test_compiles.py $(TESTS)

aot-gpu: ## compile the GPU programs for a T4 to a B200, without one (fetches CUDA: 4 GB in .venv-gpu)
	@sh launch/make_env.sh .venv-gpu dev,cuda
	.venv-gpu/bin/python -m pytest $(addprefix tests/core/ops/,$(GPU_COMPILES)) tests/experiments/benchmarks/schedules/test_ptx.py tests/compile/test_overlaps.py tests/experiments/benchmarks/schedules/test_gpu_compiles.py $(TESTS)

aot-rocm: ## compile a training step for an MI250X and an MI300X, without one (1 GB in .venv-rocm; needs cc)
	@sh launch/make_env.sh .venv-rocm dev,rocm
	.venv-rocm/bin/python -m pytest -m '' tests/compile/test_rocm.py $(TESTS)

bench: $(READY) ## time the kernels and the training step, sparse beside dense
	@$(BIN)/python -m experiments.kernel_bench $(ARGS)
	@$(BIN)/python -m experiments.step_bench $(ARGS)

bench-schedule: ## estimate the products' time on TPUs from compiled programs, without one (.venv-tpu)
	@sh launch/make_env.sh .venv-tpu dev,aot
	@.venv-tpu/bin/python -m experiments.schedule_bench $(ARGS)

bench-schedule-gpu: ## the same for GPUs from a T4 to a B200, without one (.venv-gpu)
	@sh launch/make_env.sh .venv-gpu dev,cuda
	@.venv-gpu/bin/python -m experiments.schedule_bench --chips=t4,l4,a100,h100,b200 --blocks=128 $(ARGS)

chip-report: $(READY) ## how much faster than dense this chip trains, in 9 minutes; ARGS="--minutes=30"
	@$(BIN)/python -m experiments.chip_report $(ARGS)

package: $(READY) ## build sdist and wheel, install the wheel in a new environment, train one step
	@sh launch/check_package.sh $(BIN)/python

lint: $(READY) ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy launch/local.py launch/gke/render.py

format: $(READY) ## repair style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY) ## the documentation and API reference, as a site with search in build/docs
	$(BIN)/python docs/build_site.py build/docs

lock: $(READY) ## renew constraints.txt, the versions that CI installs
	sh launch/lock.sh $(BIN)/python

clean: ## remove environments, caches and builds; run folders stay
	rm -rf .venv .venv*/ build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
