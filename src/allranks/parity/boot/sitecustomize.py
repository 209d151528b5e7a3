"""Run at the start of every Python process of a run that parity records; then the sitecustomize that this one hides."""

import os
import sys


def _begin():
    if os.environ.get("ALLRANKS_PARITY") and os.environ.get("RANK") and sys.version_info >= (3, 10):
        from allranks.parity import startup

        startup.begin(os.environ["ALLRANKS_PARITY"], os.environ.get("ALLRANKS_PARITY_OPTIONS", "{}"))


def _run_hidden():
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - any Python, and quick
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]  # noqa: PTH100
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_begin()
_run_hidden()
