# Needs Python 3.11 or later, and make. Everything else goes into .venv; `make test PIP_ARGS=…` hands arguments to pip.
SHELL := /bin/bash
.DELETE_ON_ERROR:

VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
# The first of these that is new enough. Looked for only when the environment is made.
PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v $$python && break; done)

# With the checkout first on sys.path, `import kernels` would find our folder before the published package of that name.
export PYTHONSAFEPATH = 1

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help all demo test test-slow test-gpu check format bench peer-sglang peer-lmcache coverage clean

help: ## Say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

all: check test ## Check and test

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or later found; name one with PYTHON=…" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[runner,dev]'
	@touch $@

demo: $(READY) ## Run a small model with and without the cache
	$(BIN)/tiercache demo

test: $(READY) ## Run the fast tests
	$(BIN)/python -m pytest -m "not slow and not gpu" $(PYTEST_ARGS)

# pytest exits with 5 when no test is selected.
test-slow: $(READY) ## Run the slow tests
	$(BIN)/python -m pytest -m "slow and not gpu" $(PYTEST_ARGS) || test $$? -eq 5

test-gpu: $(READY) ## Run the tests that need a CUDA device
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[cuda]'
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

check: $(READY) ## Check style, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## Put the code into its form
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY) ## Measure everything, draw it, and write the page of results
	$(BIN)/tiercache bench --out bench/results --page docs/reference/benchmarks.md $(BENCH_ARGS)

peer-sglang: .venv-sglang/.ready ## Install SGLang's trees, which `make bench` measures beside ours
# An environment of its own: the wheel alone, without what the rest of SGLang needs. What its trees import is torch, numpy, msgspec.
.venv-sglang/.ready: constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or later found; name one with PYTHON=…" >&2; exit 1; }
	test -x .venv-sglang/bin/python || $(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt torch numpy msgspec
	.venv-sglang/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps sglang==0.5.23
	@touch $@

# LMCache pins what we don't want beside us, and asks for CUDA's build of torch; so it gets an environment of its own, without what it
# only needs on a GPU. Benchmarks look for it there, or where TIERCACHE_PEER_LMCACHE says.
PEER := .venv-lmcache
PEER_NEEDS := sortedcontainers aiofile aiofiles blake3 aiohttp fastapi httpx msgspec 'numpy<=2.2.6' nvtx \
	'opentelemetry-api<=1.40' 'opentelemetry-sdk<=1.40' opentelemetry-exporter-otlp \
	'opentelemetry-exporter-prometheus<=0.61b0' 'prometheus_client<=0.24.1' psutil py-cpuinfo pyyaml pyzmq 'grpcio>=1.78' \
	grpcio-observability==1.78.0 'protobuf<7' redis safetensors uvicorn httptools cachetools cryptography numba 'setuptools<81'

peer-lmcache: $(PEER)/.ready ## Install LMCache for the benchmark beside it

$(PEER)/.ready: $(READY)
	test -x $(PEER)/bin/python || $(BIN)/python -m venv $(PEER)
	$(PEER)/bin/python -m pip install --quiet $(PIP_ARGS) torch==2.13.0
	$(PEER)/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps lmcache==0.5.6
	$(PEER)/bin/python -m pip install --quiet $(PIP_ARGS) $(PEER_NEEDS)
	@touch $@

coverage: $(READY) ## Run the fast tests and say what they leave out
	$(BIN)/python -m pytest -m "not slow and not gpu" --cov --cov-report=term-missing:skip-covered $(PYTEST_ARGS)

clean: ## Remove what was built, the environment too
	rm -rf $(VENV) .venv-sglang $(PEER) build dist *.egg-info .coverage .coverage.* htmlcov
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
