"""Texts of the code as Markdown: paragraphs, cells and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_CODE = re.compile(r"(`[^`]*`)")


def escaped(text: str) -> str:
    """Return plain text as Markdown on one line. What stands in backticks stays code."""
    parts = _CODE.split(" ".join(text.split()))
    return "".join(part if part.startswith("`") else re.sub(r"([<*\[\]])", r"\\\1", part) for part in parts)


def code(text: object) -> str:
    """Return a text as code."""
    return f"`{text}`"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with these titles of its columns; the cells are Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
