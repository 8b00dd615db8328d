# make quickstart  install what a run needs, train the tabletop example, print success before and after; the folder is
#                  runs/quickstart; ARGS="train.steps=12" for a shorter run
# make test        install everything tests need, then `make check`, the documentation and the tests of all that a change
#                  can break; on as many cores as there are, at most 8 (some 2 GB each): JOBS=2 for fewer;
#                  `make -j2 test` installs GL and Chromium beside the packages
# make test-rest   the other tests (tests/exhaustive.txt): kills at random moments, whole suites of simulators, full recipes,
#                  each model with the compiler; PART=0/3 for a third of them
# make test-all    test, test-rest, test-lowest and test-newest
# make test-times  `make test` with a table of what takes how long, docs/reference/test-times.md
# make test-changed  the tests that are near to what differs from main, nearest first; installs nothing; ARGS="--depth 3"
#                  for more of them, ARGS="--since HEAD~3" for what differs from another commit
# make test-lowest  the tests of core, models, algorithms and runtime with the lowest versions (lowest.txt), in
#                  build/lowest; TESTS="tests/core" for fewer
# make test-newest  all tests but those that step a simulator with the newest versions that pip finds within our bounds, in
#                  build/newest, and with Python 3.13 in build/newest-3.13 if there is one; TESTS="tests/core" for fewer
# make kernels     the numerical tests with the kernels of three generations of processors (CONTRIBUTING.md)
# make gymnasium-packages  conformance tests of gym-aloha, gym-hil, gym-pusht, gymnasium-robotics and lerobot-env-so101, in
#                  build/gymnasium
# make libero-warp  tests and conformance tests of libero_warp on Warp's CPU device, in build/libero-warp; compiling its
#                  kernels takes minutes
# make robotwin    RoboTwin's runtime in build/robotwin (CPU), a robot of boxes, short tests, and the conformance tests on two tasks
# make check       style, types and spelling
# make docs        the documentation site, in build/site; a broken link fails it
# make release     CHANGELOG.md from changes/, dist/ with sdist and wheel, and each of the two tried in an empty environment
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTHON313 ?= $(shell for python in python3.13 $(HOME)/.pyenv/versions/3.13*/bin/python; do \
  $$python -c '' 2>/dev/null && echo $$python && break; done)
INSTALL := $(BIN)/python -m pip install -q
TORCH := $(shell grep '^torch==' constraints.txt)
STAMP := $(shell date +%Y%m%d-%H%M%S)
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
JOBS ?= $(shell echo $$(( $(CORES) < 8 ? $(CORES) : 8 )))
SUITE := -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python $(SUITE)
BUILD_DOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

.PHONY: quickstart test test-rest test-all test-times test-changed test-lowest test-newest renderers browser kernels gymnasium-packages libero-warp \
  robotwin check docs format release base-checkpoint progress-encoder clean

quickstart: $(VENV)/.run
	@mkdir -p runs/quickstart-$(STAMP) && ln -sfn quickstart-$(STAMP) runs/quickstart
	$(BIN)/vla-rl run examples/tabletop_grpo.yaml --folder runs/quickstart-$(STAMP) $(ARGS)

test: check browser
	$(BUILD_DOCS)
	$(PYTEST) -m "not exhaustive"

test-rest: $(VENV)/.test renderers
	$(PYTEST) -m exhaustive --timeout 1800 $(if $(PART),--part $(PART))

test-all: test
	$(MAKE) test-rest
	$(MAKE) test-lowest
	$(MAKE) test-newest

test-times: $(VENV)/.test browser
	rm -rf build/test-times
	PYTHONPATH=tools $(PYTEST) -m "not exhaustive" -p time_tests
	$(BIN)/python tools/time_tests.py > docs/reference/test-times.md

test-changed:
	@files=$$($(BIN)/python tools/changed_tests.py $(ARGS)) || exit 1; test -z "$$files" || \
	  $(PYTEST) -m "not exhaustive" $$files

renderers:
	sh tools/install_gl.sh
	sh tools/install_vulkan.sh

browser: renderers
	sh tools/install_chromium.sh

# What compares floats. Ray is left out: its workers compute with the same kernels.
NUMERICAL := tests/plugins/models tests/plugins/algorithms tests/toolkit/algorithms tests/runtime \
  tests/testing
KERNELS := $(BIN)/python -m pytest -m 'not ray and not sim and not slow' --timeout=1200 $(NUMERICAL)

kernels: $(VENV)/.test
	$(KERNELS)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(KERNELS)
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 $(KERNELS)

# $(call test_versions,PYTHON,FOLDER,WHAT TO GIVE PIP FOR TORCH,FOR THE REST,TESTS): tests with other versions, in
# build/FOLDER. torch comes first, as below.
define test_versions
	$(1) -m venv build/$(2)
	@echo 'installing torch and what tests need into build/$(2): minutes, in silence'
	build/$(2)/bin/python -m pip install -q $(3)
	build/$(2)/bin/python -m pip install -q $(4) -e '.[openvla,libero,data,dev]'
	OMP_NUM_THREADS=1 build/$(2)/bin/python $(SUITE) -m "not sim and not exhaustive" $(5)
endef

# Everything but what lowest.txt names, and the packages that come with those, is as in constraints.txt.
LOWEST_TESTS := tests/core tests/toolkit tests/plugins/models tests/plugins/algorithms tests/runtime tests/cli/test_doctor.py

test-lowest:
	mkdir -p build
	grep -viE '^(torch|triton|nvidia-.*|transformers|tokenizers|huggingface_hub)==' constraints.txt > build/lowest.txt
	grep -v '^#' lowest.txt >> build/lowest.txt
	$(call test_versions,$(PYTHON),lowest,$(shell grep '^torch==' lowest.txt),-c build/lowest.txt,$(or $(TESTS),$(LOWEST_TESTS)))

NEWEST := -U --upgrade-strategy eager

test-newest:
	$(call test_versions,$(PYTHON),newest,-U torch,$(NEWEST),$(or $(TESTS),tests))
	$(if $(PYTHON313),$(call test_versions,$(PYTHON313),newest-3.13,-U torch,$(NEWEST),$(or $(TESTS),tests)),\
	  @echo 'no Python 3.13 here: make test-newest PYTHON313=/path/to/python3.13 tests with it, too')

gymnasium-packages: renderers
	$(PYTHON) -m venv build/gymnasium
	build/gymnasium/bin/python -m pip install -q $(TORCH)
	build/gymnasium/bin/python -m pip install -q -c constraints.txt -e '.[dev]' \
	  gym-aloha gym-hil gym-pusht gymnasium-robotics lerobot-env-so101
	MUJOCO_GL=egl build/gymnasium/bin/python -m pytest -v tests/plugins/envs/test_gymnasium_packages.py \
	  tests/plugins/envs/test_gym_hil.py

libero-warp:
	$(PYTHON) -m venv build/libero-warp
	build/libero-warp/bin/python -m pip install -q $(TORCH)
	grep -v '^mujoco==' constraints.txt > build/libero-warp.txt
	build/libero-warp/bin/python -m pip install -q -c build/libero-warp.txt -e '.[dev,libero-warp]'
	OMP_NUM_THREADS=1 build/libero-warp/bin/python -m pytest -v tests/plugins/envs/test_libero_warp.py \
	  tests/plugins/envs/test_libero_warp_formulas.py tests/plugins/envs/test_libero_warp_on_cuda.py \
	  'tests/tools/test_conventions.py::test_simulators_are_as_the_page_says[libero_warp]'
	build/libero-warp/bin/vla-rl check-env libero_warp suite=libero_spatial 'tasks=[0]' \
	  'cameras={agentview: 32, wrist: 32}' --num-envs 2 --chunk 2 --seconds 30

robotwin: renderers $(VENV)/.test
	$(PYTHON) -m venv build/robotwin
	build/robotwin/bin/python -m pip install -q $(TORCH)
	build/robotwin/bin/python -m pip install -q -r tools/robotwin_requirements.txt $$(grep '^ray==' constraints.txt)
	build/robotwin/bin/python -m pip install -q --no-deps sapien==3.0.3 rlinf-robotwin-runtime==0.1.3 -e .
	build/robotwin/bin/python tools/robotwin_assets.py build/robotwin-assets
	$(BIN)/python -m pytest -v tests/plugins/envs/test_robotwin_runtime.py
	for task in stack_blocks_two blocks_ranking_rgb; do build/robotwin/bin/python -m vla_rl.cli.main check-env robotwin \
	  tasks=$$task assets=build/robotwin-assets render=raster --seconds 30 || exit 1; done

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs
	$(BUILD_DOCS)

release: $(VENV)/.test
	$(INSTALL) -c constraints.txt twine
	OMP_NUM_THREADS=1 sh tools/release.sh $(abspath $(BIN)/python)

base-checkpoint: $(VENV)/.run
	$(BIN)/python tools/base_checkpoint.py

progress-encoder: $(VENV)/.test
	$(BIN)/python tools/progress_encoder.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'vla-rl needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)'; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Stamps: an install is repeated only after pyproject.toml or constraints.txt changed. torch comes first, so that its
# build (CPU, or a CUDA version) is settled before anything depends on it.
$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing $(TORCH) and what a run needs into $(VENV): minutes, in silence (4.0 GB to download if torch is for CUDA)'
	$(INSTALL) $(TORCH)
	$(INSTALL) -c constraints.txt -e '.[openvla,serve]'
	@touch $@

$(VENV)/.test: $(VENV)/.run
	@echo 'installing simulators and what tests need into $(VENV): minutes, in silence'
	$(INSTALL) -c constraints.txt -e '.[all,docs,dev]'
	$(INSTALL) -c constraints.txt --no-deps gym-hil  # what its devices need clashes with ours
	@touch $@

$(VENV)/.docs: $(VENV)/.run
	$(INSTALL) -c constraints.txt -e '.[docs]'
	@touch $@
