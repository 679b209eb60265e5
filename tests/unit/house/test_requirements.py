"""What texts tell a person to install is what hpctrain accepts, and no name on a package index that is not ours."""

from __future__ import annotations

import ast
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from hpctrain.base.requirements import pip_install
from hpctrain.cli.commands.docs import documentation_pages

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

OUTSIDE = {
    ".git", ".venv", "build", "dist", "runs", "demo", "__pycache__", "node_modules", ".mypy_cache", ".pytest_cache",
    "site",
}  # fmt: skip
TEXTS = {".md", ".py", ".j2", ".yaml", ".yml", ".toml", ".txt", ".html", ".js", ".sh", ".sbatch", ".ipynb", ".def", ""}
INSTALL = re.compile(
    r"\b(?:pip3?|pipx|uv|uvx|conda|mamba|micromamba|pixi|poetry)\s+(?:install|add|download)\s+([^`\n]*)"
)
PAGE = re.compile(r"docs/[\w/-]+\.md")


def texts(repository: Path) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of every file that people or pip read, except this one."""
    for folder, folders, names in os.walk(repository):
        folders[:] = sorted(set(folders) - OUTSIDE)
        for path in (Path(folder, name) for name in sorted(names)):
            if path.is_file() and path.suffix in TEXTS and path != Path(__file__):
                yield str(path.relative_to(repository)), path.read_text(errors="ignore")


def requirements(repository: Path) -> dict[str, Requirement]:
    """Return what hpctrain and its extras need, by name."""
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    lines = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    return {canonicalize_name(item.name): item for item in map(Requirement, lines)}


def installed_words(text: str) -> Iterator[str]:
    """Yield every word of the install commands in a text."""
    for words in INSTALL.findall(text):
        yield from (word.strip("'\"),.;") for word in words.split())


def asks_an_index_for_hpctrain(text: str) -> bool:
    by_name = re.compile(r"hpctrain(\[.*)?([<>=~!;@].*)?", re.IGNORECASE)
    return any(map(by_name.fullmatch, installed_words(text)))


def test_no_text_asks_a_package_index_for_hpctrain(repository: Path) -> None:
    """The name may belong to somebody else there; a folder or a wheel of hpctrain is a path."""
    assert [path for path, text in texts(repository) if asks_an_index_for_hpctrain(text)] == []


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("run `pip install hpctrain`", True),
        ("pip3 install -U 'hpctrain[data]'", True),
        ("uv pip install hpctrain>=1", True),
        ("pip install --no-index -f wheels wheels/hpctrain-0.1.0-py3-none-any.whl", False),
        ("`pip install` of hpctrain, pip install ./hpctrain", False),
    ],
)
def test_an_install_command_with_the_name_is_seen(text: str, asks: bool) -> None:
    assert asks_an_index_for_hpctrain(text) is asks


def test_the_versions_in_documents_are_those_of_the_metadata(repository: Path) -> None:
    accepted = requirements(repository)
    pages = [(path, text) for path, text in texts(repository) if path.startswith("docs/") or path == "README.md"]
    bound = re.compile(r"[\w-]+[<>].*")
    named = [
        (path, Requirement(word)) for path, text in pages for word in installed_words(text) if bound.fullmatch(word)
    ]
    assert len(named) >= 3
    assert [
        (path, item) for path, item in named if item.specifier != accepted[canonicalize_name(item.name)].specifier
    ] == []


def test_the_versions_that_make_installs_are_accepted(repository: Path) -> None:
    accepted = requirements(repository)
    pins = [Requirement(line) for line in (repository / "constraints.txt").read_text().splitlines() if line[:1] != "#"]
    assert len(pins) >= 5
    for pin in pins:
        (version,) = pin.specifier
        assert Version(version.version) in accepted[canonicalize_name(pin.name)].specifier, pin


@pytest.mark.parametrize("name", ["submitit", "pydantic", "mkdocs", "torch"])
def test_what_is_known_to_break_has_an_upper_bound(repository: Path, name: str) -> None:
    assert any(part.operator == "<" for part in requirements(repository)[name].specifier)


def test_a_missing_package_is_told_with_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = "hpctrain.base.requirements.importlib.metadata.requires"
    monkeypatch.setattr(metadata, lambda name: ["click>=8", 'wandb<1,>=0.19; extra == "track"'])
    assert pip_install("wandb", "spacy") == "pip install 'wandb<1,>=0.19' spacy"


def printed_texts(path: Path) -> Iterator[str]:
    """Yield the string constants of a module that a person may see: all but docstrings, and in `cli` and `records` the
    docstrings too, which become help and schema."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    shown = {"cli", "records"} & set(path.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (shown or id(node) not in docstrings):
            yield node.value


def test_messages_name_pages_that_an_installed_package_has(repository: Path) -> None:
    modules = [path for path in sorted((repository / "hpctrain").rglob("*.py")) if "docs" in path.read_text()]
    shown = [(path, text) for path in modules for text in printed_texts(path)]
    assert [f"{path}: {text}" for path, text in shown if PAGE.search(text)] == []
    named = {name for _, text in shown for name in re.findall(r"`hpctrain docs ([\w/-]+)`", text)}
    assert len(named) >= 3
    assert named <= set(documentation_pages())
