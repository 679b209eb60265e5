"""The house itself: its layers, the size and the names of its files, and that its documents tell the truth."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tools.docs_site import navigation

LONGEST = 400
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc"}
UNFINISHED = re.compile(r"#.*\b(TODO|FIXME|XXX)\b|raise NotImplementedError|pragma: no cover")
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:|#)([^)#\s]+)")
OUTSIDE = {".git", ".venv", "build", "dist", "runs", "demo", "__pycache__", ".pytest_cache", "node_modules"}


def sources(repository: Path) -> list[Path]:
    return sorted((repository / "hpctrain").rglob("*.py"))


def documents(repository: Path) -> list[Path]:
    return sorted(
        path for path in repository.rglob("*.md") if not OUTSIDE & set(path.relative_to(repository).parts[:-1])
    )


def test_no_file_is_too_long_to_hold_one_subject(repository):
    lengths = {str(path.relative_to(repository)): len(path.read_text().splitlines()) for path in sources(repository)}
    assert len(lengths) > 20
    assert {path: length for path, length in lengths.items() if length > LONGEST} == {}


def test_every_name_says_its_subject(repository):
    paths = [path.relative_to(repository) for path in sources(repository)]
    assert [path for path in paths if VAGUE & {part.removesuffix(".py") for part in path.parts}] == []


def test_nothing_is_left_unfinished(repository):
    found = [
        f"{path.relative_to(repository)}:{number}"
        for path in sources(repository)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert found == []


def test_every_module_says_what_it_is_for(repository):
    silent = [path for path in sources(repository) if not path.read_text().startswith('"""')]
    assert silent == []


def test_links_between_documents_lead_somewhere(repository):
    assert len(documents(repository)) > 5
    broken = [
        f"{path.relative_to(repository)}: {target}"
        for path in documents(repository)
        for target in LINK.findall(path.read_text())
        if not (path.parent / target).exists()
    ]
    assert broken == []


def site_pages() -> list[str]:
    """The pages that mkdocs.yml names, as paths within docs/."""
    return navigation.pages(navigation.with_pages(yaml.safe_load(navigation.CONFIG.read_text())["nav"]))


def test_every_document_is_a_page_of_the_site(repository):
    """A page that fails here is missing in `nav` of mkdocs.yml: add it to the section where a reader looks for it."""
    present = {str(path.relative_to(repository / "docs")) for path in (repository / "docs").rglob("*.md")}
    in_nav = site_pages()
    assert sorted(present - set(in_nav)) == [], "add these pages to nav in mkdocs.yml"
    assert sorted(set(in_nav) - present - set(navigation.FROM_OUTSIDE)) == [], "remove these pages from nav"
    assert len(in_nav) == len(set(in_nav))


def test_every_page_begins_with_what_its_reader_can_do(repository):
    """Except for the first page, the list of changes, and the records of decisions."""
    record = re.compile(r"decisions/\d{4}-")
    others = [page for page in site_pages() if page not in ("index.md", "changes.md") and not record.match(page)]
    opening = re.compile(r"# [^\n]+\n\nAfter this (page|tutorial) you can ")
    silent = [page for page in others if not opening.match((repository / navigation.source_of(page)).read_text())]
    assert silent == [], "begin these pages with 'After this page you can …'"


@pytest.mark.slow
def test_the_layers_hold(repository):
    lint_imports = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [lint_imports, "--no-cache"], cwd=repository, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


def test_a_run_folder_s_run_file_is_read_through_the_one_door(repository: Path) -> None:
    """`run_of` checks whose it is; `read_run` is for the files that a person names."""
    by_path = re.compile(r"\bread_(?:run|yaml)\((?!run_file)[^)\n]*run\.yaml")
    found = [path.name for path in sources(repository) if by_path.search(path.read_text())]
    assert found == []
