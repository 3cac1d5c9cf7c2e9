# `make demo` trains, `make test` tests; both set up what they need in .venv, once.
.DEFAULT_GOAL := help
.PHONY: help demo test test-fast harnesses harnesses-smoke vllm vllm-smoke chaos siege siege-smoke kube kube-smoke check base bench-learning bench-gateway bench-memory bench-launch bench-samples clean

PYTHON ?= $$(scripts/python)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
DEMO := examples/micro_swe

help:
	@echo "make demo             train a tiny model through the unmodified mini-swe-agent (about 6 minutes, 2 cores)"
	@echo "make test             all tests"
	@echo "make harnesses        fourteen real agent harnesses through the gateway (installs them in ~/.cache/leyden/harnesses)"
	@echo "make harnesses-smoke  five of them"
	@echo "make vllm             tests on a real vLLM on CPU (installs it in ~/.cache/leyden/vllm, once)"
	@echo "make vllm-smoke       the shortest of them"
	@echo "make chaos            1,000 rollouts of mixed kinds while the controller is killed again and again"
	@echo "make siege            50,000 mutated requests, the largest bodies, 100 random kills, what hostile agents leave"
	@echo "make siege-smoke      a small one"
	@echo "make kube-smoke       the shortest of those on Kubernetes (below)"
	@echo "make kube             tests on a real Kubernetes cluster: a local one (root, Debian 12), or that of KUBECONFIG"
	@echo "make check            lint, types, layers"
	@echo "make base             make the demo's base model again ($(DEMO)/base)"
	@echo "make bench-learning   the demo's training at full length, three seeds"
	@echo "make bench-gateway    CPU and latency of the gateway per call"
	@echo "make bench-memory     memory of the gateway and size of its store per recorded call"
	@echo "make bench-launch     rollouts per second of the controller"
	@echo "make bench-samples    training samples per rollout of mini-swe-agent"

$(STAMP): pyproject.toml requirements.lock
	@python=$(PYTHON) && scripts/venv "$$python" embedded,dev
	@touch $@ $(DEMO_STAMP)

$(DEMO_STAMP): pyproject.toml requirements.lock
	@python=$(PYTHON) && scripts/venv "$$python" embedded,demo --no-compile
	@touch $@

demo: $(DEMO_STAMP)
	$(BIN)/python $(DEMO)/demo.py

test: $(STAMP)
	PATH="$(abspath $(BIN)):$$PATH" scripts/test

test-fast: $(STAMP)
	PATH="$(abspath $(BIN)):$$PATH" scripts/test -m "not slow"

harnesses: $(STAMP)
	$(BIN)/python -m tests.harnesses

harnesses-smoke: $(STAMP)
	$(BIN)/python -m tests.harnesses --smoke

vllm: $(STAMP)
	$(BIN)/python -m tests.vllm.set_up
	PATH="$(abspath $(BIN)):$$PATH" scripts/test -m vllm -rs tests/vllm

vllm-smoke: $(STAMP)
	$(BIN)/python -m tests.vllm.set_up
	PATH="$(abspath $(BIN)):$$PATH" scripts/test -m "vllm and not slow" -rs tests/vllm

siege: $(STAMP)
	PATH="$(abspath $(BIN)):$$PATH" python -m tests.siege

siege-smoke: $(STAMP)
	PATH="$(abspath $(BIN)):$$PATH" python -m tests.siege --small

chaos: $(STAMP)
	PATH="$(abspath $(BIN)):$$PATH" scripts/test -s -m chaos tests/controller

kube-smoke: $(STAMP)
	$(BIN)/python -m tests.kube.set_up
	PATH="$(abspath $(BIN)):$$PATH" LEYDEN_KUBE_ROLLOUTS=4 scripts/test -m kube tests/kube/test_rollouts.py -k many

kube: $(STAMP)
	$(BIN)/python -m tests.kube.set_up
	PATH="$(abspath $(BIN)):$$PATH" scripts/test -m kube tests/kube

check: $(STAMP)
	PATH="$(abspath $(BIN)):$$PATH" scripts/check

base: $(STAMP)
	$(BIN)/python $(DEMO)/make_base.py

bench-learning bench-gateway bench-memory bench-launch bench-samples: bench-%: $(STAMP)
	$(BIN)/python benchmarks/bench_$*.py

clean:
	rm -rf $(VENV) build
