# make demo    train a small policy to repair code, from nothing to a summary
# make test    the whole test suite
# make check   format, lint, types, the house's rules
# make bench   ours beside its peers, about half an hour; `make bench-peers` installs the peers first
# make clean   remove .venv and caches (never runs/)
#
# PYTHON=...       the interpreter for .venv (3.11 to 3.14; found by itself)
# TORCH_INDEX=...  a package index for torch; on Linux without a GPU its CPU builds are much smaller
# DEMO_ARGS=...    settings on top of the demo's, such as DEMO_ARGS="--seconds 60"

export PYTHON TORCH_INDEX
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test check bench bench-peers clean venv
.DEFAULT_GOAL := demo

$(INSTALLED): pyproject.toml constraints.txt
	@sh .ci/venv

venv: $(INSTALLED)

demo: $(INSTALLED)
	@$(BIN)/python examples/code_repair/demo.py $(DEMO_ARGS)

test: $(INSTALLED)
	@$(BIN)/pytest $(TEST_ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest tests/test_house.py

bench: $(INSTALLED)
	@for name in engine agentic step publish rollout; do $(BIN)/python bench/$$name.py $(BENCH_ARGS) || exit 1; done

bench-peers: $(INSTALLED)
	@sh bench/peers/setup

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
