# make quickstart  install what a run needs, train the tabletop example, print success before and after; the folder is
#                  runs/quickstart; ARGS="train.steps=12" for a shorter run
# make test        install everything tests need, then `make check` and all tests; `make -j2 test` installs GL beside the packages
# make exhaustive  further cases of slow tests: each model with the compiler, each measured row of memory
# make test-lowest  the tests of core, models, algorithms and runtime with the lowest versions (lowest.txt), in
#                  build/lowest; TESTS="tests/core" for fewer
# make kernels     the numerical tests with the kernels of three generations of processors (CONTRIBUTING.md)
# make gymnasium-packages  conformance tests of gym-aloha, gym-hil, gym-pusht and gymnasium-robotics, in build/gymnasium
# make robotwin    RoboTwin's runtime in build/robotwin (CPU), a robot of boxes, short tests, and the conformance tests on two tasks
# make check       style, types and spelling
# make docs        the documentation site, in build/site; a broken link fails it
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -q
TORCH := $(shell grep '^torch==' constraints.txt)
STAMP := $(shell date +%Y%m%d-%H%M%S)

.PHONY: quickstart test exhaustive test-lowest renderers kernels gymnasium-packages robotwin check docs format base-checkpoint progress-encoder clean

quickstart: $(VENV)/.run
	@mkdir -p runs/quickstart-$(STAMP) && ln -sfn quickstart-$(STAMP) runs/quickstart
	$(BIN)/vla-rl run examples/tabletop_grpo.yaml --folder runs/quickstart-$(STAMP) $(ARGS)

test: check renderers
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not exhaustive"

exhaustive: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m exhaustive

renderers:
	sh tools/install_gl.sh
	sh tools/install_vulkan.sh

# What compares floats. Ray is left out: its workers compute with the same kernels.
NUMERICAL := tests/plugins/models tests/plugins/algorithms tests/toolkit/algorithms tests/runtime \
  tests/testing
KERNELS := $(BIN)/python -m pytest -m 'not ray and not sim and not slow' --timeout=1200 $(NUMERICAL)

kernels: $(VENV)/.test
	$(KERNELS)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(KERNELS)
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 $(KERNELS)

# Everything but what lowest.txt names, and the packages that come with those, is as in constraints.txt.
TESTS ?= tests/core tests/toolkit tests/plugins/models tests/plugins/algorithms tests/runtime tests/cli/test_doctor.py
LOWEST := build/lowest/bin/python -m pip install -q

test-lowest:
	$(PYTHON) -m venv build/lowest
	grep -viE '^(torch|triton|nvidia-.*|transformers|tokenizers|huggingface_hub)==' constraints.txt \
	  > build/lowest/constraints.txt
	grep -v '^#' lowest.txt >> build/lowest/constraints.txt
	$(LOWEST) $$(grep '^torch==' lowest.txt)
	$(LOWEST) -c build/lowest/constraints.txt -e '.[openvla,libero,data,dev]'
	OMP_NUM_THREADS=1 build/lowest/bin/python -m pytest -n 2 --dist loadfile -m "not sim and not exhaustive" $(TESTS)

gymnasium-packages: renderers
	$(PYTHON) -m venv build/gymnasium
	build/gymnasium/bin/python -m pip install -q $(TORCH)
	build/gymnasium/bin/python -m pip install -q -c constraints.txt -e '.[dev]' \
	  gym-aloha gym-hil gym-pusht gymnasium-robotics
	MUJOCO_GL=egl build/gymnasium/bin/python -m pytest -v tests/plugins/envs/test_gymnasium_packages.py \
	  tests/plugins/envs/test_gym_hil.py

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
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

base-checkpoint: $(VENV)/.run
	$(BIN)/python tools/base_checkpoint.py

progress-encoder: $(VENV)/.test
	$(BIN)/python tools/progress_encoder.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'vla-rl needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)'; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Stamps: an install is repeated only after pyproject.toml or constraints.txt changed. torch comes first, so that its
# build (CPU, or a CUDA version) is settled before anything depends on it.
$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) $(TORCH)
	$(INSTALL) -c constraints.txt -e '.[openvla,serve]'
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(INSTALL) -c constraints.txt -e '.[openvla,libero,maniskill,metaworld,data,dev]'
	$(INSTALL) -c constraints.txt --no-deps gym-hil  # what its devices need clashes with ours
	@touch $@

$(VENV)/.docs: $(VENV)/.run
	$(INSTALL) -c constraints.txt -e '.[docs]'
	@touch $@
