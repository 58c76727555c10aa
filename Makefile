# demo, test, lint, bench, peers: each starts from a bare clone, in an environment of its own (.venv).

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
JOB ?= examples/calculator.toml
TESTS ?= tests
# One thread a process: two on a busy machine are up to 30 times slower than one.
export OMP_NUM_THREADS := 1
# What Python compiles is kept: hundreds of processes would compile the same sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-sglang verifiers lint format bench peers clean

demo: $(READY)
	$(BIN)/meshrl run $(JOB) $(if $(SEED),--seed $(SEED)) $(if $(WORKERS),--set mesh.workers=$(WORKERS)) $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n 4 --dist loadgroup $(TESTS)

# A real SGLang server: what every engine promises, what is its own, and a job of three steps.
test-sglang: export MESHRL_SGLANG_PYTHON := $(CURDIR)/.venvs/sglang/bin/python
test-sglang: $(READY)
	tests/sglang/cpu/install.sh .venvs/sglang
	$(BIN)/python -m pytest -n 0 -k sglang tests/sglang tests/unit/common/generation tests/unit/engine tests/unit/meshrl
	$(BIN)/meshrl run $(JOB) --force --set out=runs/sglang --set rollout.engine=sglang \
		--set rollout.sglang_python=$(MESHRL_SGLANG_PYTHON) $(SHORT)

# Two workers, few and short trajectories, no evaluation: a few minutes on two cores.
SHORT := --set mesh.workers=2 --set rollout.slots=16 --set budget.steps=3 \
	--set algorithm.groups_per_step=4 --set algorithm.group_size=4 \
	--set algorithm.filter_zero_variance=false --set warm_start.steps=120 \
	--set evaluation.before=false --set evaluation.after=false --set evaluation.every=0

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy common meshrl services sim
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m loadtests.rpc
	$(BIN)/python -m loadtests.overhead
	$(BIN)/python -m loadtests.engine
	$(BIN)/python -m loadtests.longtail
	$(BIN)/python -m loadtests.trainer
	$(BIN)/python -m loadtests.replay
	$(BIN)/python -m loadtests.sandbox
	$(BIN)/python -m loadtests.damage --count 20

# What benchmarks compare with: vLLM and TRL in environments of their own; pyzmq and transformers
# are in ours.
peers: $(READY)
	loadtests/peers/install.sh .venvs/vllm
	loadtests/peers/install_trl.sh .venvs/trl
	$(BIN)/python -c "import zmq, transformers as t; print('pyzmq', zmq.__version__, 'transformers', t.__version__)"

# What tests of verifiers' environments need: its own interpreter, as it pins what others do not.
verifiers: $(READY)
	PYTHON=$(PYTHON) tests/verifiers/install.sh .venvs/verifiers

# torch goes first and exactly: an open range would pull gigabytes of CUDA packages.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .import_linter_cache .pytest_cache build *.egg-info
