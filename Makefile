# The two commands: `make demo` and `make test`. Both set up a virtual environment first, once.

PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin/python
INSTALL = $(BIN) -m pip install -qq --disable-pip-version-check -c constraints.txt
NEEDS := $(BIN) pyproject.toml constraints.txt

# Nothing here asks a model hub, so that nothing reaches for one by accident.
export HF_HUB_OFFLINE := 1

.PHONY: help demo serve test test-slow test-browser test-clients test-matrix torture test-lm format docs clean

help:  ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  PYTHON=python3.12 chooses the interpreter, VENV=folder another virtual environment."

demo: $(VENV)/.installed  ## Remember three paragraphs, then answer: LM alone, memory, BM25, BM25 + memory.
	$(VENV)/bin/mac-rag try

serve: $(VENV)/.installed-server  ## Serve mac-small to this machine, with a page at http://127.0.0.1:8080.
	$(VENV)/bin/mac-rag serve $(if $(MAC_RAG_SERVE_DATA)$(MAC_RAG_SERVE_CONFIG),,--data served)

test: $(VENV)/.installed-dev  ## Lint, check types and imports, run the tests.
	$(BIN) -m ruff check .
	$(BIN) -m ruff format --check .
	$(BIN) -m mypy
	$(VENV)/bin/lint-imports
	$(BIN) -m pytest --import-mode=prepend --doctest-modules mac_rag
	$(BIN) -m pytest -n 2 --dist worksteal

test-slow: $(VENV)/.installed-dev  ## Run the tests that `make test` leaves out because they take long.
	$(BIN) -m pytest -n 2 --dist worksteal -m slow

test-browser: $(VENV)/.installed-dev  ## Test the server's page in Chromium, which has to be there (CHROMIUM=its path).
	CHROMIUM=$(CHROMIUM) $(BIN) -m pytest -m browser tests/browser

test-clients: $(VENV)/.installed-dev  ## Test the server by LlamaIndex's client, and by openai 2, which that needs.
	$(BIN) -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target build/openai2 \
		'openai<3' llama-index-llms-openai llama-index-llms-openai-like
	PYTHONPATH=build/openai2 $(BIN) -m pytest -m 'not slow' tests/server/test_clients.py tests/server/test_completions.py

test-matrix: $(VENV)/.installed-dev  ## Test every LM architecture in every dtype under every modulation.
	$(BIN) -m pytest -n 2 -m 'not lm' --junitxml build/matrix.xml tests/lm tests/pipelines/test_kv_regression.py
	$(BIN) -m tests.lm.matrix_table build/matrix.xml docs/guides/your-lm.md

torture: $(VENV)/.installed-dev  ## Kills, faults, mutations, ... for hours; it goes on where it stopped (PARTS=, RUNS=).
	OMP_NUM_THREADS=1 $(BIN) -m tests.torture $(PARTS) $(if $(RUNS),--runs $(RUNS)); \
		status=$$?; $(BIN) -m tests.torture.table; exit $$status

test-lm: $(VENV)/.installed-dev  ## Test on a real pretrained LM, which it fetches first.
	$(VENV)/bin/mac-rag fetch smollm2-135m
	$(BIN) -m pytest -m lm

format: $(VENV)/.installed-dev  ## Sort imports and format the code.
	$(BIN) -m ruff check --fix .
	$(BIN) -m ruff format .

docs: $(VENV)/.installed-dev  ## Build the documentation into site/, strictly and offline.
	NO_MKDOCS_2_WARNING=1 $(BIN) -m mkdocs build --strict --quiet

clean:  ## Remove the virtual environment and all caches.
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site *.egg-info

$(BIN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "mac_rag needs Python 3.11 or later; choose one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "creating $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(NEEDS)
	@echo "installing mac_rag with PyTorch, transformers and LlamaIndex (a few minutes the first time) ..."
	@$(INSTALL) -e '.[llama-index]'
	@touch $@

$(VENV)/.installed-server: $(NEEDS)
	@echo "installing mac_rag with its server (a few minutes the first time) ..."
	@$(INSTALL) -e '.[server,files]'
	@touch $@

$(VENV)/.installed-dev: $(NEEDS)
	@echo "installing mac_rag with all extras and the development tools (a few minutes the first time) ..."
	@$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed $(VENV)/.installed-server
