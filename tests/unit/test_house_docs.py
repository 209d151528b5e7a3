"""Do the documents keep their word: links that lead somewhere, a page for every code, one version?"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "allranks"
CAUSES = ROOT / "docs" / "causes"
SECTIONS = ["What it is", "How it shows", "Why it happens", "What to do", "How we know"]
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
SKIPPED = frozenset({".venv", ".git", "node_modules", "runs", "__pycache__", ".pytest_cache"})


def pages() -> list[Path]:
    """Every Markdown file of the project."""
    return sorted(p for p in ROOT.rglob("*.md") if not SKIPPED & set(p.relative_to(ROOT).parts))


def anchors(page: Path) -> set[str]:
    """What a link may name in the page, as the usual Markdown sites make anchors of headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_relative_links_then_lead_somewhere() -> None:
    broken = []
    for page in pages():
        for link in LINK.findall(re.sub(r"`[^`\n]*`", "", page.read_text())):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken, "\n".join(broken)


def test_documents_then_each_is_linked_from_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link.split("#")[0]).resolve() for link in LINK.findall(index.read_text())}
    ours = {page for page in pages() if index.parent in page.parents and CAUSES not in page.parents} - {index}
    missing = sorted(str(page.relative_to(ROOT)) for page in ours - linked)
    assert not missing, f"not linked from docs/README.md: {missing}"


def codes_in_source() -> dict[str, str]:
    """Every code that stands in a string of the package, with the first file that has it."""
    found: dict[str, str] = {}
    for path in sorted(SRC.rglob("*.py")):
        for code in re.findall(r"""["'](AR\d{3})["' :]""", path.read_text()):
            found.setdefault(code, str(path.relative_to(ROOT)))
    return found


def test_codes_then_each_has_a_page_and_each_page_a_code() -> None:
    codes = codes_in_source()
    have = {page.stem for page in CAUSES.glob("AR*.md")}
    without_page = [f"{code} ({codes[code]})" for code in sorted(codes.keys() - have)]
    assert not without_page, f"codes without docs/causes/ARnnn.md: {without_page}"
    assert not (unused := sorted(have - codes.keys())), f"pages whose code nothing raises: {unused}"


@pytest.mark.parametrize("page", sorted(CAUSES.glob("AR*.md")), ids=lambda page: page.stem)
def test_cause_page_then_has_its_title_and_sections(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert re.fullmatch(rf"# {page.stem} [a-z0-9]+(-[a-z0-9]+)*", lines[0]), lines[0]
    assert [line.removeprefix("## ") for line in lines if line.startswith("## ")] == SECTIONS


def test_cause_names_then_differ() -> None:
    names = [page.read_text().splitlines()[0].split(" ", 2)[2] for page in CAUSES.glob("AR*.md")]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)


def test_cause_index_then_lists_the_pages_as_they_are() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "list-causes"], capture_output=True, text=True, check=True
    )
    assert done.stdout == (CAUSES / "README.md").read_text(), "run scripts/list-causes --write"


def test_reference_then_says_what_the_docstrings_say() -> None:
    script = ROOT / "scripts" / "list-reference"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    assert done.stdout == page, "run .venv/bin/python scripts/list-reference --write"


def test_version_then_the_changelog_begins_with_it() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert first and first.group(1) == version, f"pyproject.toml says {version}, CHANGELOG.md {first}"
    assert f'__version__ = "{version}"' in (SRC / "__init__.py").read_text()


def test_constraints_then_pin_what_the_project_admits() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {re.split(r"==", line)[0].strip() for line in lines}
    extras = [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    wanted = [*project["dependencies"], *extras]
    names = {re.split(r"[\[<>=!~; ]", requirement)[0] for requirement in wanted} - {"allranks"}
    assert names <= pinned, f"not in constraints.txt: {sorted(names - pinned)}"


def test_readme_then_fits_and_shows_the_two_commands_first() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 200
    first_screen = "\n".join(lines[:60])
    assert "make demo" in first_screen and "make test" in first_screen
    assert next(number for number, line in enumerate(lines, 1) if line.startswith("```")) < 25


def test_repository_then_names_no_registry() -> None:
    hosts = ["pypi" + ".org", "pythonhosted" + ".org", "download.pytorch" + ".org", "npmjs" + ".org"]
    hosts += ["deb.debian" + ".org", "conda.anaconda" + ".org"]
    named = []
    for folder in ("src", "tests", "docs", "recipes", "scripts", "bench", ".ci"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in ("", ".py", ".md", ".sh", ".txt", ".toml", ".yaml"):
                text = path.read_text(errors="replace")
                named += [f"{path.relative_to(ROOT)}: {host}" for host in hosts if host in text]
    assert not named, named
