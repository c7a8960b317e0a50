# One line each; the same names in CI and README. PYTHON makes the environment, $(PY) is inside it.
PYTHON ?= python3
VENV   ?= .venv
PY      = $(VENV)/bin/python
PIP     = $(PY) -m pip install -q --disable-pip-version-check
BENCH   = .venv-bench
COMPAT  = .venv-torchrl
ARGS   ?=

.PHONY: demo test compat check-cuda bench build lint models aarch64 native soak sanitize fuzz mutants wheel clean

demo: $(VENV)/.built  ## 4 collectors, one learner: DQN on CartPole until the return is 400
	$(PY) examples/dqn_cartpole.py $(ARGS)

test: $(VENV)/.built  ## the whole suite
	$(PY) -m pytest -n 2 --dist loadgroup $(ARGS)
	$(if $(ARGS),,$(MAKE) compat)

# TORCHRL_SRC: a checkout of TorchRL, whose own replay-buffer tests are then run against our classes.
TORCHRL_TESTS = test_query.py test_rb_core.py test_rb_transforms.py test_prioritized.py test_ensemble.py::TestRBMultidim \
  $(addprefix test_samplers.py::,TestFindStartStopTraj TestSamplers TestStalenessAwareSampler) $(addprefix test_writers.py::,TestMultiProc TestMaxValueWriter)
compat: $(COMPAT)/.built  ## TorchRL beside us, as an oracle
	$(COMPAT)/bin/python -m pytest tests/compat $(ARGS)
	$(if $(TORCHRL_SRC),$(COMPAT)/bin/python -m pytest -p tests.compat.torchrl_suite.plugin -c /dev/null -p no:cacheprovider --timeout 60 \
	  $(addprefix $(abspath $(TORCHRL_SRC))/test/rb/,$(TORCHRL_TESTS)))

bench: $(BENCH)/.built  ## peers and limits side by side in one run
	$(BENCH)/bin/python -m tools.bench $(ARGS)

build: $(VENV)/.built  ## the environment with everything the tests need, and both builds of the core

lint: $(VENV)/.built
	$(PY) -m ruff check shmbuf tests tools examples && $(PY) -m mypy

check-cuda: $(VENV)/.built  ## device memory on a GPU: tests, deaths, figures; ARGS=--standin without one
	$(PY) -m tools.dev.check_cuda $(ARGS)

models: $(VENV)/.built  ## SPIN models and litmus tests
	$(PY) tools/dev/models.py $(ARGS)

native:  ## the C++ driver: plain, TSan, ASan+UBSan, clang
	$(MAKE) -C tests/native run steps tsan asan clang

aarch64:  ## the C++ driver cross-built, under qemu-user
	$(MAKE) -C tests/native aarch64

soak: $(VENV)/.built  ## 10,000 SIGKILLs with take-over times; the long forms of the process tests; the large models; checkpoints above 4 GiB
	$(PY) -m tests.process.soak
	SHMBUF_SOAK=1 $(PY) -m pytest -n 2 tests/process tests/property $(ARGS)
	$(PY) tools/dev/models.py --soak
	$(PY) -m tools.dev.large_checkpoint

sanitize: $(VENV)/.built  ## ASan and UBSan over the Python suite; ARGS=--fast, --torch
	$(PY) tools/dev/sanitize.py $(ARGS)

RUNTIME ?= 60
fuzz: $(VENV)/.built  ## libFuzzer on damaged segments, RUNTIME seconds
	$(MAKE) -C tests/fuzz run PY=$(abspath $(PY)) RUNTIME=$(RUNTIME)

mutants: $(VENV)/.built  ## seeded bugs: each must be caught
	$(PY) tools/dev/mutants.py $(ARGS)

wheel: $(VENV)/.made
	$(PY) -m pip wheel -q --no-deps -w dist .

clean:
	rm -rf build dist $(VENV) $(BENCH) $(COMPAT) tests/native/out

SOURCES = $(wildcard shmbuf/native/*.h shmbuf/native/*.cpp) CMakeLists.txt pyproject.toml requirements/dev.txt
NATIVE  = -C build-dir=build/dev -C cmake.define.SHMBUF_FAILPOINTS=ON -C cmake.define.SHMBUF_WERROR=$(if $(CI),ON,OFF)

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	touch $@

# An editable install with both builds of the core: the shipped one and the one whose steps can be killed by name.
$(VENV)/.built: $(VENV)/.made $(SOURCES)
	$(PIP) -c requirements/dev.txt scikit-build-core nanobind cmake ninja
	$(PIP) -c requirements/dev.txt --no-build-isolation $(NATIVE) -e '.[test,dev,examples,datasets,ray]'
	touch $@

# TorchRL wants an older tensordict than we do: these few packages in an environment of their own, over all that is in $(VENV).
SITE = -c "import site; print(site.getsitepackages()[0])"
$(COMPAT)/.built: requirements/torchrl.txt | $(VENV)/.built
	$(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/torchrl.txt
	echo "import site; site.addsitedir('$$($(PY) $(SITE))')" > "$$($(COMPAT)/bin/python $(SITE))/development.pth"
	touch $@

# Peers have an environment of their own; reverb's TensorFlow needs NumPy 1, so another again (a dash in the table if it fails).
BPIP = $(BENCH)/bin/python -m pip install -q --disable-pip-version-check
$(BENCH)/.peers: tools/bench/requirements.txt tools/bench/requirements-reverb.txt
	$(PYTHON) -m venv $(BENCH)
	$(BPIP) --upgrade pip
	$(BPIP) -r tools/bench/requirements.txt
	-$(PYTHON) -m venv $(BENCH)/reverb && $(BENCH)/reverb/bin/python -m pip install -q -r tools/bench/requirements-reverb.txt
	touch $@
$(BENCH)/.built: $(BENCH)/.peers $(SOURCES) $(wildcard shmbuf/*.py shmbuf/samplers/*.py)
	$(BPIP) .
	$(BPIP) --force-reinstall --no-deps .
	touch $@
