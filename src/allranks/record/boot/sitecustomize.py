"""Run at the start of every Python process of a job: installs the probe, then the sitecustomize that this one hides.

`allranks run` puts this folder first on PYTHONPATH. Plain enough for any Python: a user's tool may be Python 2.
Without ALLRANKS_RECORD_DIR, or where allranks cannot be imported, nothing is installed.
"""

import os
import sys


def _install_probe():
    if not os.environ.get("ALLRANKS_RECORD_DIR") or sys.version_info < (3, 10):
        return
    try:
        from allranks.record import startup
    except ImportError:  # another Python, one that has no allranks
        return
    startup.begin(os.environ["ALLRANKS_RECORD_DIR"])


def _run_hidden():
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - any Python, and quick
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]  # noqa: PTH100
    if sys.version_info < (3, 4):  # noqa: UP036 - a tool's Python, not ours
        return
    if not any(_may_hold_one(entry) for entry in sys.path):
        return  # importlib.util costs 5 ms
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _may_hold_one(entry):
    stem = os.path.join(entry or ".", "sitecustomize")  # noqa: PTH118
    return os.path.exists(stem + ".py") or os.path.isdir(stem) or entry.endswith(".zip")  # noqa: PTH110, PTH112


_install_probe()
_run_hidden()
