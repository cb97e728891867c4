# Everything a contributor or CI runs. `make test` and `make demo` need Python >= 3.11 and nothing else: they make an
# environment in $(VENV) first. With no C++ compiler, what Inductor would compile for the CPU is skipped (test) or run
# without it (demo), and both say so.
#
#   make test PYTHON=python3.12             another interpreter
#   make test TORCH='torch==2.11.0'         another torch; an index for CPU builds: TORCH='torch==2.13.0 --index-url URL'
#   make test VENV=path                     an environment of your own; a suitable torch in it is kept

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# Processes that run tests side by side, and seconds after which a whole test run is stopped.
WORKERS ?= 2
TEST_LIMIT ?= 2280
PYTEST_ARGS ?=

BIN = $(VENV)/bin
SOURCES = fasa_compile patterns profiles triton_kernels tests examples benchmarks
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | while IFS='|' read -r a b; do printf '%-18s %s\n' "$$a" "$$b"; done

# --- environment -------------------------------------------------------------------------------------------------------

# torch comes first and alone, and is pinned in what follows, so that no later step can bring another build of it.
$(VENV)/torch.txt:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python >= 3.11 is needed; '$(PYTHON)' is not: make PYTHON=python3.11 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if $(BIN)/python -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))' 2>/dev/null; \
		then echo "keeping the torch that is in $(VENV)"; \
		else echo "installing $(TORCH) into $(VENV)"; $(BIN)/python -m pip install --quiet $(TORCH); fi
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@.new
	@mv $@.new $@

$(VENV)/%.stamp: pyproject.toml $(VENV)/torch.txt
	@echo "installing fasa_compile with its '$*' extra into $(VENV)"
	@$(BIN)/python -m pip install --quiet --constraint $(VENV)/torch.txt --editable '.[$*]'
	@touch $@

.PRECIOUS: $(VENV)/torch.txt $(VENV)/%.stamp

# --- checks ------------------------------------------------------------------------------------------------------------

.PHONY: fmt lint types
fmt: $(VENV)/dev.stamp ## format the sources and apply the linter's safe fixes
	@$(BIN)/ruff format $(SOURCES)
	@$(BIN)/ruff check --fix $(SOURCES)

lint: $(VENV)/dev.stamp ## ruff: format check and lint
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/ruff check $(SOURCES)

types: $(VENV)/dev.stamp build/mapped ## mypy on the package
	@$(BIN)/mypy

# The package as the wheel lays it out, in links, for mypy and the API page.
.PHONY: build/mapped
build/mapped:
	@rm -rf $@ && mkdir -p $@/fasa_compile
	@cd $@/fasa_compile && ln -s ../../../fasa_compile/* . && ln -s ../../../patterns ../../../profiles ../../../triton_kernels .

# --- tests -------------------------------------------------------------------------------------------------------------

# $(1): what to run. A test has 10 minutes (pyproject.toml), a run has TEST_LIMIT seconds.
define bounded
@rc=0; $(if $(shell command -v timeout),timeout -k 30 $(TEST_LIMIT)) $(1) || rc=$$?; \
case $$rc in \
	0) ;; \
	5) echo "no test ran: that is a failure"; exit 5 ;; \
	124|137) echo "the tests took more than $(TEST_LIMIT) s and were stopped"; exit $$rc ;; \
	*) exit $$rc ;; \
esac
endef

.PHONY: test test-fast test-gpu properties
test: lint types ## format, lint, types and all tests that need no GPU
	$(call bounded,$(BIN)/pytest -q -n $(WORKERS) --dist loadfile -m "not gpu" $(PYTEST_ARGS))

test-fast: $(VENV)/dev.stamp ## the tests that take seconds
	$(call bounded,$(BIN)/pytest -q -n $(WORKERS) --dist loadfile -m "not gpu and not slow" $(PYTEST_ARGS))

# In one process, which counts the examples; new ones in each run.
properties: $(VENV)/dev.stamp ## the property tests at nightly size: more than 20,000 examples (the table goes to build/properties.json)
	@mkdir -p build
	@HYPOTHESIS_PROFILE=nightly FASA_EXAMPLES=build/properties.json $(BIN)/pytest -q -s --timeout 3600 tests/properties $(PYTEST_ARGS)

# The libraries bring requirements that would change torch and transformers, so they go in without them, into an environment of
# their own that sees the other one.
$(VENV)-zoo/zoo.stamp: $(VENV)/dev.stamp tests/zoo/libraries.txt
	@test -x $(VENV)-zoo/bin/python || $(BIN)/python -m venv $(VENV)-zoo
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(" + repr(sysconfig.get_paths()["purelib"]) + ")")' \
		> "$$($(VENV)-zoo/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/base.pth"
	@$(VENV)-zoo/bin/python -m pip install --quiet --no-deps -r tests/zoo/libraries.txt
	@touch $@

.PHONY: zoo
zoo: $(VENV)-zoo/zoo.stamp ## every causal-LM architecture of transformers, and three model libraries from PyPI (minutes)
	@$(VENV)-zoo/bin/python -m pytest -q tests/zoo $(PYTEST_ARGS)
	@mkdir -p docs build
	@$(BIN)/python tests/zoo/run_zoo.py --jobs $(WORKERS) --out build/zoo.json --table docs/coverage.md $(ZOO_ARGS)

# Measuring takes half as long again. The target fails where tests do, and below 92 %. What a run that was stopped has measured is no
# record: the processes that run tests lose theirs.
.PHONY: coverage
coverage: TEST_LIMIT = 5400
coverage: $(VENV)/dev.stamp ## line and branch coverage by the tests that need no GPU: at least 92 %, and a list of the lines that are left
	@rm -f .coverage .coverage.* && mkdir -p build
	@rc=0; $(if $(shell command -v timeout),timeout -k 30 $(TEST_LIMIT)) \
		$(BIN)/python -m coverage run -m pytest -q -n $(WORKERS) --dist loadfile -m "not gpu" $(PYTEST_ARGS) || rc=$$?; \
	test $$rc -le 1 || { echo "the tests did not run to their end ($$rc): nothing is recorded"; exit $$rc; }; \
	$(BIN)/python -m coverage combine -q && $(BIN)/python -m coverage json -q -o build/coverage.json --fail-under 0 && \
	$(BIN)/python tests/coverage_record.py build/coverage.json --not-run "tests that need a GPU" && \
	$(BIN)/python -m coverage report && exit $$rc

.PHONY: mutants
mutants: $(VENV)/dev.stamp ## breaks the package in more than 200 ways and shows which test notices each (half an hour of CPU time)
	@$(BIN)/python tests/mutation/run_mutants.py $(MUTANT_ARGS); rc=$$?; \
		$(BIN)/python tests/mutation/run_mutants.py --table docs/mutations.md && exit $$rc

# Installs nothing: it runs with the interpreter that has a CUDA torch and pytest, on this checkout.
test-gpu: ## the tests that need a CUDA device, with $(PYTHON) as it is
	$(call bounded,bash -c '. tests/gpu/path.sh && exec $(PYTHON) -P -m pytest -q -m gpu tests/gpu $(PYTEST_ARGS)')

# --- documentation -----------------------------------------------------------------------------------------------------

.PHONY: docs
docs: $(VENV)/docs.stamp build/mapped ## the pages of docs/ as a site in build/site
	@$(BIN)/python -m mkdocs build --quiet
	@echo "build/site/index.html"

# --- the demo ----------------------------------------------------------------------------------------------------------

.PHONY: demo clean
demo: $(VENV)/demo.stamp ## SmolLM2 answers a question over 3k tokens, dense and sparse (the first run downloads 90 MB)
	@$(BIN)/python examples/demo.py $(DEMO_ARGS)

clean: ## remove the environment and everything that was built
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
