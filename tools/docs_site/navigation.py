"""Which pages the site has: those of docs/, and a few from elsewhere in the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
CONFIG = ROOT / "mkdocs.yml"

FROM_OUTSIDE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
    "slurm.md": "slurm/README.md",
    "topology-examples.md": "topology/README.md",
    "containers.md": "containers/README.md",
}
"""Page of the site -> its file in the repository, for pages that are not in docs/."""


def source_of(page: str) -> str:
    """Return the path within the repository of a page of the site."""
    return FROM_OUTSIDE.get(page) or f"{DOCS}/{page}"


def page_of(source: str) -> str | None:
    """Return the page of the site that shows a file of the repository; None if the site does not have the file."""
    inside = source.removeprefix(f"{DOCS}/") if source.startswith(f"{DOCS}/") else None
    return next((page for page, path in FROM_OUTSIDE.items() if path == source), inside)


def with_pages(entry: Any, docs: Path = ROOT / DOCS) -> Any:
    """Return an entry of `nav` in which each folder (a text that ends with '/') is replaced by its pages: README.md
    first, then the others by name. In a list, the pages are entries of that list."""
    if isinstance(entry, dict):
        return {title: with_pages(value, docs) for title, value in entry.items()}
    if isinstance(entry, list):
        values = [(value, with_pages(value, docs)) for value in entry]
        return [item for value, new in values for item in (new if isinstance(value, str) and new != value else [new])]
    if not entry.endswith("/"):
        return entry
    pages = sorted((docs / entry).glob("*.md"), key=lambda path: (path.name != "README.md", path.name))
    return [str(path.relative_to(docs)) for path in pages]


def pages(entry: Any) -> list[str]:
    """Return all pages in an entry of `nav`, in order."""
    if isinstance(entry, dict):
        return [page for value in entry.values() for page in pages(value)]
    if isinstance(entry, list):
        return [page for value in entry for page in pages(value)]
    return [entry]
