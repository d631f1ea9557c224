# The project's commands. Each sets up what it needs first and can be run again at once.
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# JAX's CUDA plugin, Triton and jax-triton come only where there is an NVIDIA driver to use them.
RUN_EXTRAS := $(if $(shell command -v nvidia-smi 2>/dev/null),[gpu])

.PHONY: help demo study test lint types test-ends parity clean

help:
	@echo "make demo       the whole job on a real model, on this machine (about 10 minutes on 2 cores)"
	@echo "make study      the study: trains and measures what is not in the results yet (ARGS=--dry-run)"
	@echo "make test       every test (no network, no GPU)"
	@echo "make lint       style"
	@echo "make types      types"
	@echo "make parity     compare with torch, transformers and peft, in an environment of its own"
	@echo "make test-ends  the tests on the oldest and the newest dependencies of the pinned ranges"

demo: $(VENV)/.run
	$(BIN)/wide demo $(ARGS)

# Runs go to STUDY, results to eval/results/study.jsonl, what they say to docs/study.md.
STUDY ?= ../study
study: $(VENV)/.study
	$(BIN)/python -m eval.study --out "$(STUDY)" $(ARGS)
	$(BIN)/python -m eval.study.document

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/pyrefly check

# jax-triton is held to jax < 0.12 (pyproject.toml), so the newest end goes without the kernels
# that need it; the oldest end has every lower bound.
test-ends: $(VENV)-oldest/.ends $(VENV)-newest/.ends
	$(VENV)-oldest/bin/python -m pytest -n 2 --dist loadfile -q $(ARGS)
	$(VENV)-newest/bin/python -m pytest -n 2 --dist loadfile -q $(ARGS)

# The harness is compared on real tasks, so that part needs their data (DATA_DIR).
DATA_DIR ?= ../shared/data
parity: $(VENV)/.dev
	tests/parity/run.sh $(BIN)/python
	@if [ -d "$(DATA_DIR)" ]; then eval/parity/run.sh "$(DATA_DIR)" $(BIN)/python; \
	else echo "no task data at $(DATA_DIR): the harness is not compared (set DATA_DIR)"; fi

$(VENV)/bin/python:
	@python="$$(tools/find_python.sh)" && echo "making $(VENV) with $$python" && "$$python" -m venv $(VENV)

$(VENV)/.run: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV) (pinned ranges, no torch)"
	@$(PIP) --editable '.$(RUN_EXTRAS)'
	@touch $@

$(VENV)/.study: $(VENV)/.run
	@$(PIP) --editable '.[eval]'
	@touch $@

# The CUDA plugin is there only to lower kernels for absent cards (jax-triton's lowering rules live
# in it); without its dependencies it brings no CUDA library and starts no device.
$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing the development tools into $(VENV) (pinned ranges, no torch)"
	@$(PIP) --editable '.[dev]'
	@$(PIP) --no-deps "jax-cuda13-plugin==$$($(BIN)/python -c 'import jax; print(jax.__version__)')"
	@touch $@ $(VENV)/.run

$(VENV)-%/.ends: pyproject.toml tests/constraints/%.txt
	@python="$$(tools/find_python.sh)" && "$$python" -m venv $(VENV)-$*
	@$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint tests/constraints/$*.txt --editable '.[test,eval]'
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest build dist *.egg-info
