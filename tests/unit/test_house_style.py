"""Does the code keep the rules of the house that no linter checks? (CONTRIBUTING.md lists them.)"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "allranks"
CODE = [SRC, ROOT / "tests", ROOT / "recipes", ROOT / "bench"]
MAX_LINES = 400
GRAB_BAGS = frozenset({"utils", "util", "helpers", "helper", "common", "misc", "base"})
# stdout is the script's: only the commands, and run.print(), which is a print of the user's, write to it.
MAY_PRINT = ("cli/", "train/deciding.py")
# What has no logger yet (the probe, before the script) or none at all (the agent) says it on stderr.
MAY_PRINT_TO_STDERR = ("record/", "run/")
# Scripts line for line as users write them, many of them broken on purpose; ruff leaves them alone too.
USERS_SCRIPTS = {ROOT / "tests/faults/scripts", ROOT / "tests/faults/quiet", ROOT / "bench/overhead"}
# Where torch has no public way. A new entry is a decision: say why in the file, and have a fallback.
MAY_USE_PRIVATE_TORCH: dict[str, set[str]] = {
    "comm/joining.py": {"_get_default_store"},
    "data/torch_inside.py": {"_utils"},
    "record/compat.py": {"_C", "_distributed_c10d"},
    # torch.optim's own names for "all tensors of a list in one call"; older than torch 2.0.
    "wrap/precision.py": {"_foreach_lerp_", "_foreach_mul_"},
    # Base classes of every batch norm, public in all but name: isinstance only.
    "wrap/batchnorm.py": {"_BatchNorm"},
    "wrap/buffers.py": {"_NormBase"},
}


def python_files(*folders: Path) -> list[Path]:
    """Every Python file below the folders."""
    return sorted(
        path for folder in folders for path in folder.rglob("*.py") if "__pycache__" not in path.parts
    )


def name_of(path: Path) -> str:
    """A path as a person reads it."""
    return str(path.relative_to(ROOT))


def nodes(path: Path) -> Iterator[ast.AST]:
    """Every node of the file's syntax tree."""
    return ast.walk(ast.parse(path.read_text(), filename=str(path)))


def dotted(node: ast.AST) -> str:
    """'torch.distributed.x' of a chain of attributes, '' if it does not begin with a name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def test_file_length_then_within_the_limit() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in python_files(*CODE)}
    long = [f"{name_of(path)}: {length}" for path, length in lengths.items() if length > MAX_LINES]
    assert not long, f"files over {MAX_LINES} lines: {long}"


def test_module_docstring_then_every_file_says_what_it_answers() -> None:
    files = [path for path in python_files(*CODE) if not USERS_SCRIPTS & set(path.parents)]
    silent = [name_of(path) for path in files if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent, f"files without a module docstring: {silent}"


def test_names_then_no_grab_bags() -> None:
    bags = [name_of(path) for path in python_files(*CODE) if GRAB_BAGS & {path.stem, *path.parent.parts}]
    assert not bags, f"name the question the file answers: {bags}"


def test_test_files_then_names_differ() -> None:
    # pytest imports them by their base name, and ranks find a function by it.
    twice = [
        name for name, n in Counter(p.name for p in (ROOT / "tests").rglob("test_*.py")).items() if n > 1
    ]
    assert not twice, f"two test files of one name: {twice}"


def test_code_then_is_ascii() -> None:
    other = []
    for path in python_files(*CODE):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not line.isascii():
                other.append(f"{name_of(path)}:{number}: {line.strip()[:60]}")
    assert not other, "\n".join(other)


def test_print_then_only_where_a_person_reads() -> None:
    talkers = []
    for path in python_files(SRC):
        name = name_of(path).removeprefix("src/allranks/")
        for node in nodes(path):
            if not (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            ):
                continue
            to_stderr = any(k.arg == "file" and dotted(k.value) == "sys.stderr" for k in node.keywords)
            if not name.startswith(MAY_PRINT + (MAY_PRINT_TO_STDERR if to_stderr else ())):
                talkers.append(f"{name}:{node.lineno}")
    assert not talkers, f"print outside {MAY_PRINT}: {talkers}"


def test_private_torch_then_only_what_is_listed() -> None:
    found: dict[str, set[str]] = {}
    for path in python_files(SRC):
        if names := set(private_torch(path)):
            found[name_of(path).removeprefix("src/allranks/")] = names
    assert found == MAY_USE_PRIVATE_TORCH


def private_torch(path: Path) -> Iterator[str]:
    """Names of torch that begin with one underscore, imported or reached by attributes."""
    roots = {"torch", "dist", "nn", "F"}
    for node in nodes(path):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            dots = [alias.name.split(".") for alias in node.names]
            names = [part for parts in dots if parts[0] == "torch" for part in parts]
        elif isinstance(node, ast.Attribute) and dotted(node).split(".")[0] in roots:
            names = [node.attr]
        yield from (name for name in names if name.startswith("_") and not name.startswith("__"))


def test_promises_then_nothing_is_left_open() -> None:
    words = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    left = []
    for path in python_files(*CODE):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            left += [f"{name_of(path)}:{number}: {word}" for word in words if word in line]
        left += [
            f"{name_of(path)}:{n.lineno}: not done"
            for n in nodes(path)
            if isinstance(n, ast.Raise) and is_stub(n)
        ]
    assert not left, left


def is_stub(node: ast.Raise) -> bool:
    """raise NotImplementedError, with or without a text."""
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"


def test_public_names_then_sorted_few_and_documented() -> None:
    program = (
        "import allranks, inspect\n"
        "names = list(allranks.__all__)\n"
        "assert names == sorted(names), names\n"
        "assert len(names) <= 20, len(names)\n"
        "assert set(names) <= set(dir(allranks)), set(names) - set(dir(allranks))\n"
        "things = {n: getattr(allranks, n) for n in names}\n"
        "bare = [n for n, t in things.items() if callable(t) and not inspect.getdoc(t)]\n"
        "assert not bare, bare\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_dunder_all_then_sorted_in_every_package() -> None:
    unsorted = []
    for path in python_files(SRC):
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
                names = ast.literal_eval(node.value)  # type: ignore[attr-defined]
                unsorted += [name_of(path)] if list(names) != sorted(names) else []
    assert not unsorted, f"__all__ not sorted: {unsorted}"


def test_command_when_imported_then_torch_is_not() -> None:
    program = "import sys, allranks.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_importing_allranks_then_changes_nothing() -> None:
    program = (
        "import os, sys, logging, threading, warnings\n"
        "state = lambda: (dict(os.environ), logging.root.handlers[:], threading.active_count(), warnings.filters[:])\n"
        "before = state()\n"
        "import allranks\n"
        "sys.exit(state() != before or 'torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
