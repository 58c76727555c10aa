# demo, check, test, lint, bench, dist, site, peers: each starts from a bare clone, in its own environment (.venv).

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
JOB ?= examples/calculator.toml
TESTS ?= tests
TEST_WORKERS ?= 8
TYPED := meshrl loadtests tests
# One thread per process: two on a busy machine are up to 30 times slower than one.
export OMP_NUM_THREADS := 1
# Bytecode is cached, because hundreds of processes would compile the same sources again.
unexport PYTHONDONTWRITEBYTECODE
# The first import of a module compiles it; most modules of large packages are never imported.
export PIP_NO_COMPILE := 1

.PHONY: demo check test test-deep test-ci test-timing test-kubernetes test-sglang verifiers lint format bench gpu-check peers dist site images image-digests test-compose test-slurm test-monitoring clean

demo: $(READY)
	$(BIN)/meshrl run $(JOB) $(if $(SEED),--seed $(SEED)) $(if $(WORKERS),--set mesh.workers=$(WORKERS)) $(ARGS)

# The tests that find defects daily. The commit selects the deep and rotating tests among them.
test: $(READY)
	$(BIN)/python -m pytest --workers $(TEST_WORKERS) $(TESTS)

# All tests: an hour of a virtual mesh, a hundred seeds, every tier of the sandbox, all real meshes.
test-deep: $(READY)
	$(BIN)/python -m pytest --workers $(TEST_WORKERS) --tier deep $(TESTS)

# The daily tests, a seventh of the others, and those of a recently changed folder, in rotation.
test-ci: $(READY)
	$(BIN)/python -m pytest --workers $(TEST_WORKERS) --tier ci --hold-budget $(TESTS)

# The tests that measure time: one after the other, on an idle host.
test-timing: $(READY)
	$(BIN)/python -m pytest --tier timing $(TESTS)

# Within a minute: style, types, and the tests of changes since the commit SINCE that start no process.
SINCE ?= HEAD
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)
	$(BIN)/python -m tests.runner.changed $(SINCE)

# Each alert of compose/monitoring fires on a mesh of two hosts, and clears: `prometheus` of Debian.
test-monitoring: $(READY)
	$(BIN)/python -m pytest --tier deep tests/deploy/monitoring
	$(BIN)/python -m loadtests.monitoring

# A real SGLang server: the contract of every engine, its own tests, and a job of three steps.
test-sglang: export MESHRL_SGLANG_PYTHON := $(CURDIR)/.venvs/sglang/bin/python
test-sglang: $(READY)
	tests/sglang/cpu/install.sh .venvs/sglang
	$(BIN)/python -m pytest --tier deep -k sglang tests/sglang tests/unit/common/generation tests/unit/engine tests/unit/meshrl
	$(BIN)/meshrl run $(JOB) --force --set out=runs/sglang --set rollout.engine=sglang \
		--set rollout.sglang_python=$(MESHRL_SGLANG_PYTHON) $(SHORT)

# A head and workers as jobs of Debian's Slurm, in namespaces of this machine; needs root.
test-slurm: $(READY)
	$(BIN)/python -m tests.deploy.slurm

# Two workers, few and short trajectories, no evaluation: a few minutes on two cores.
SHORT := --set mesh.workers=2 --set rollout.slots=16 --set budget.steps=3 \
	--set algorithm.groups_per_step=4 --set algorithm.group_size=4 \
	--set algorithm.filter_zero_variance=false --set warm_start.steps=120 \
	--set evaluation.before=false --set evaluation.after=false --set evaluation.every=0

# Images for containers, on a CPU and on GPUs. BASE_IMAGE, TORCH_INDEX, PIP_CONF and PIP_CA: see
# docs/operate/deploy.md.
IMAGES ?= cpu cuda
PIP_CONF ?= $(firstword $(wildcard $(HOME)/.config/pip/pip.conf $(HOME)/.pip/pip.conf))
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE_SERVICES := cpu=secrets cuda=workers

images: export PIP_CONF := $(PIP_CONF)
images: export VERSION := $(VERSION)
images:
	docker compose -f compose/compose.yaml -f compose/gpu.yaml build \
		$(foreach image,$(IMAGES),$(patsubst $(image)=%,%,$(filter $(image)=%,$(IMAGE_SERVICES))))

# Each pinned image with its digest, as its registry has it now.
PINNED_IMAGES = $(shell grep -ohE 'docker\.io/[a-z0-9/._-]+:[A-Za-z0-9._-]+' \
	compose/images/Dockerfile compose/compose.yaml | sort -u)

image-digests:
	@for image in $(PINNED_IMAGES); do \
		if digest=$$(timeout 60 docker buildx imagetools inspect --format '{{print .Manifest.Digest}}' $$image); \
		then echo "$$image@$$digest"; \
		else echo "$$image: no registry answers, so its digest is unknown" >&2; failed=1; fi; \
	done; exit $${failed:-0}

# compose/ as users run it, each container restarted once: needs a container engine, or root on
# Debian, where it starts one.
test-compose: export MESHRL_TEST_COMPOSE := 1
test-compose: $(READY)
	$(BIN)/python -m pytest --tier deep tests/deploy/compose

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)
	$(BIN)/lint-imports
	.ci/prose

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

# A host with a GPU, in at most eight minutes, from a bare clone: GPU_PYTHON is any Python that has
# torch (docs/operate/gpu.md). GPU_ARGS are options of the script, such as --cpu.
GPU_PYTHON ?= $(PYTHON)
GPU_OUT ?= runs/gpu-check

gpu-check:
	mkdir -p $(GPU_OUT)
	$(GPU_PYTHON) -m loadtests.gpu --json $(GPU_OUT)/figures.json --markdown $(GPU_OUT)/table.md $(GPU_ARGS)

# A wheel and an sdist, in dist/, the wheel built from the sdist.
dist: $(READY)
	rm -rf dist build
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python .ci/check-dist

# The documentation as a searchable site, in site/. Dead links and pages without an entry fail.
site: .venvs/site/ready
	NO_MKDOCS_2_WARNING=1 .venvs/site/bin/mkdocs build

.venvs/site/ready: constraints.txt
	$(PYTHON) -m venv .venvs/site
	.venvs/site/bin/pip install --quiet -c constraints.txt mkdocs-material mdx_truly_sane_lists
	touch $@

# Programs that benchmarks compare with: vLLM and TRL in separate environments; pyzmq and transformers
# in .venv.
peers: $(READY)
	loadtests/peers/install.sh .venvs/vllm
	loadtests/peers/install_trl.sh .venvs/trl
	$(BIN)/python -c "import zmq, transformers as t; print('pyzmq', zmq.__version__, 'transformers', t.__version__)"

# Validate Kubernetes objects against the schemas of its versions, and run all their containers with
# Docker as one mesh that trains. Uses the image of $MESHRL_IMAGE, or meshrl:cpu.
test-kubernetes: $(READY) .venvs/kubernetes/ready
	$(BIN)/python -m pytest --tier deep tests/deploy/kubernetes
	$(BIN)/python -m tests.deploy.kubernetes

.venvs/kubernetes/ready: constraints.txt
	$(PYTHON) -m venv .venvs/kubernetes
	.venvs/kubernetes/bin/pip install --quiet -c constraints.txt "kubernetes-validate==1.37.0"
	touch $@

# Interpreter for tests of verifiers' environments, separate because verifiers pins its dependencies.
verifiers: $(READY)
	PYTHON=$(PYTHON) tests/verifiers/install.sh .venvs/verifiers

# torch goes first and exactly: an open range would pull gigabytes of CUDA packages. Editable by a
# path: a finder of setuptools would take longer to import, in every process, than Python to start.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]" --config-settings editable_mode=compat
	touch $(READY)

clean:
	rm -rf .venv site .mypy_cache .ruff_cache .import_linter_cache .pytest_cache build dist *.egg-info
