# make demo    install, and train a small network on two ranks (about a minute after the download of torch)
# make test    install what the tests need, and run all checks and tests
# make check   only what is quick: style, layers, types, unit tests (after make test has installed them)
# make soak    200 kills at random moments, each resumed and compared bit for bit (an hour)
# make clean   remove what these made

.PHONY: demo test check soak clean
# Compiling all of torch takes longer than compiling what is used, when it is used.
PIP = .venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt

demo: .venv/installed-recipes
	.venv/bin/allranks run --nproc 2 recipes/digits.py

test: .venv/installed-test
	scripts/check

check: .venv/installed-test
	scripts/check --quick

soak: .venv/installed-test
	: > soak.log
	ALLRANKS_SOAK_MOMENTS=200 ALLRANKS_SOAK_LOG=$(CURDIR)/soak.log .venv/bin/python -m pytest -s \
		tests/e2e/test_resume_soak.py tests/net/test_resume_on_hosts.py -k "not elastic"
	PYTHONPATH=tests .venv/bin/python -m support.soak soak.log

.venv/bin/python:
	python=$$(scripts/find-python) && "$$python" -m venv .venv

.venv/installed-%: .venv/bin/python pyproject.toml constraints.txt hatch_build.py src/allranks/record/_quick.c
	@echo "installing allranks[$*] into .venv (torch is large: minutes on a slow line)"
	$(PIP) --editable '.[$*]'
	@touch $@

clean:
	rm -rf soak.log src/allranks/record/*.so .venv runs .pytest_cache .ruff_cache .hypothesis .import_linter_cache
