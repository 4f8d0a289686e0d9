# Two commands do everything on a fresh machine: `make serve` and `make test`. `make test-all` is what CI runs.
PYTHON ?= $(shell for p in python3.14 python3.13 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
SERVING := $(VENV)/.serving
STAMP := $(VENV)/.installed
DEVICELESS := $(VENV)/deviceless/.installed
MODEL ?=
SEED ?= 0
ONLY ?=
# The pinned wheels bring pyright and node: lint needs no network, so do not look for newer versions.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# Images often forbid it; then each process that a test starts would compile all modules again, for five seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: docs install deviceless serve test test-all quick-tests all-tests lint style types goldens notebooks parity meshes formats clients schemas bench clean

# What serves, and what development needs beside it. Both choose CUDA where there is an NVIDIA GPU: see deploy/install.py.
define INSTALL
	@test -n "$(PYTHON)" || { echo "jaxserve needs Python 3.12 or newer. Install it (for example: apt install python3.12-venv, or pyenv install 3.12) or name one: make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) deploy/install.py $(VENV)
endef

$(SERVING): pyproject.toml constraints.txt
	$(INSTALL)
	@touch $@

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(INSTALL) --extra dev
	@touch $@ $(SERVING)

# jax's CUDA plugin compiles for a GPU that is not there. In a folder of its own: where it finds no driver, it complains
# at each start of jax.
deviceless: $(DEVICELESS)

$(DEVICELESS): constraints.txt | install
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt --target $(@D) jax-cuda13-plugin jax-cuda13-pjrt
	@touch $@

serve: $(SERVING)
	$(BIN)/jaxserve serve $(MODEL)

# A process takes a file's tests, which use the same compiled programs and servers; tests/conftest.py orders the files.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

# Before each commit: everything that a change usually breaks. Pyright has one thread, so tests run beside it.
test: style deviceless
	$(MAKE) --jobs 2 types quick-tests

# In CI: also whole steps compiled for an H200, kernels emulated in many orders, long runs and further cases of a kind.
test-all: style deviceless
	$(MAKE) --jobs 2 types all-tests

# Pyright checks types beside them. Checked at each call, by shape too, they cost a fifth more time: CI does that for these.
quick-tests: export CHECK_TYPES = 0
quick-tests:
	$(PYTEST) -m "not slow" --hypothesis-profile quick

all-tests:
	$(PYTEST)

lint: style types

style: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/support/lint_docstrings.py jaxserve pallas_kernels checkpoints tests

types: install
	$(BIN)/pyright

# Golden values from transformers, for any SEED, of models whose name begins with ONLY. They need torch, hence a Python
# 3.11 venv of their own.
goldens:
	tests/goldens/make.sh "$(SEED)" "$(ONLY)"

# The notebooks, run from top to bottom and saved with their outputs; those whose name begins with ONLY.
notebooks: install
	$(BIN)/python tests/support/save_notebooks.py "$(ONLY)"

# The worst error of every model family against transformers.
parity: install
	$(BIN)/python tests/support/golden_models.py

# The error of every kind of model on every mesh, against one device.
meshes: install
	$(BIN)/python tests/support/meshes.py

# The table of quantized formats: how far from their own packages, and bits of a value as stored and as held.
formats: install
	JAX_PLATFORMS=cpu $(BIN)/python tests/support/package_goldens.py

# Clients in the wild against a real server, in virtual environments of their own; those of JavaScript need node and npm.
CLIENTS := .venv-clients
clients: install $(CLIENTS)/.installed
	cd tests/clients && ../../$(CLIENTS)/bin/python -m pytest

$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/requirements-aiperf.txt \
		tests/clients/requirements-guidellm.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet -r tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)/aiperf
	$(CLIENTS)/aiperf/bin/python -m pip install --quiet -r tests/clients/requirements-aiperf.txt
	$(PYTHON) -m venv $(CLIENTS)/guidellm
	$(CLIENTS)/guidellm/bin/python -m pip install --quiet -r tests/clients/requirements-guidellm.txt
	npm install --silent --no-audit --no-fund --prefix $(CLIENTS)/node openai@6.49.0 ai@6.0.326 \
		@ai-sdk/openai@3.0.141 @ai-sdk/openai-compatible@2.0.92 zod@4.6.7
	@touch $@

# JSON Schema's own test suite, which the sources of jsonschema carry, through the engine.
SCHEMA_SUITE := .json-schema-test-suite
schemas: $(SCHEMA_SUITE)/.unpacked
	JSON_SCHEMA_TEST_SUITE=$(SCHEMA_SUITE)/json/tests/draft2020-12 $(BIN)/python -m pytest tests/structured/test_schemas.py

$(SCHEMA_SUITE)/.unpacked: constraints.txt | install
	rm -rf $(@D)
	mkdir $(@D)
	$(BIN)/python -m pip download --quiet --no-deps --no-binary jsonschema -c constraints.txt -d $(@D) jsonschema
	tar xzf $(@D)/jsonschema-*.tar.gz -C $(@D) --strip-components 1
	@touch $@

# The site of docs/, with the API reference from docstrings; a broken link is an error.
DOCS := .venv-docs
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet --site-dir .site

$(DOCS)/.installed: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet -r docs/requirements.txt
	@touch $@

bench: install
	$(BIN)/jaxserve bench throughput

clean:
	rm -rf $(VENV) .venv-goldens .venv-clients .venv-docs .site $(SCHEMA_SUITE)
