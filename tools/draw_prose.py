"""Prints random docstrings of the package and paragraphs of the docs, so that somebody can read each one alone.

    python tools/draw_prose.py [SEED] [--count 10]

A text that raises a question is rewritten. The printed seed draws the same texts again from the same tree.
"""

from __future__ import annotations

import argparse
import ast
import random
import secrets
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Definition = ast.Module | ast.ClassDef | ast.FunctionDef
FEWEST_WORDS = 4
"""Fewest words of a paragraph that is drawn. A shorter paragraph only labels the table or the listing below it."""

NO_PROSE = ("#", "|", "    ", "<", "Status:")
"""How blocks begin that are no paragraphs: headings, tables, listings, pictures, and the status line of a decision."""


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the place, the signature and the text of each docstring of a module, a class or a function."""
    for path in sorted((ROOT / "hpctrain").rglob("*.py")):
        for node, owner in _definitions(ast.parse(path.read_text()), ""):
            text = ast.get_docstring(node)
            if text:
                yield f"{path.relative_to(ROOT)}: {_head(node, owner)}", text + _field_texts(node)


def _definitions(node: Definition, owner: str) -> Iterator[tuple[Definition, str]]:
    """Yield this definition and those within it, each with the names of the classes around it, as 'Loop.'."""
    yield node, owner
    within = owner + f"{node.name}." if isinstance(node, ast.ClassDef) else owner
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from _definitions(child, within)


def _head(node: Definition, owner: str) -> str:
    """Return the line to print above a docstring: the signature of a function, or the name of a class."""
    if isinstance(node, ast.Module):
        return "the module"
    if isinstance(node, ast.ClassDef):
        return f"class {owner}{node.name}"
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {owner}{node.name}({ast.unparse(node.args)}){returned}"


def _field_texts(node: Definition) -> str:
    """Return the fields of a class with the texts below them, as they stand below the docstring; empty otherwise."""
    if not isinstance(node, ast.ClassDef):
        return ""
    lines = []
    for field, below in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
        if isinstance(field, ast.AnnAssign):
            lines.append(f"    {ast.unparse(field)}")
            if (
                isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                lines.append(f"        {below.value.value}")
    return "\n" + "\n".join(lines) if lines else ""


def paragraphs() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each paragraph or list of the docs; headings, tables and listings are left
    out."""
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        line, in_fence = 1, False
        for block in path.read_text().split("\n\n"):
            starts_in_fence = in_fence
            in_fence ^= block.count("```") % 2 == 1
            is_prose = not (starts_in_fence or "```" in block or block.startswith(NO_PROSE))
            if is_prose and len(block.split()) >= FEWEST_WORDS:
                yield f"{path.relative_to(ROOT)}:{line}", block.strip()
            line += block.count("\n") + 2


def main() -> None:
    """Print the seed, and the docstrings and paragraphs that it draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", nargs="?", type=int, default=secrets.randbelow(10_000))
    parser.add_argument("--count", type=int, default=10)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    print(f"seed {options.seed}")
    for texts in (list(docstrings()), list(paragraphs())):
        for place, text in draw.sample(texts, options.count):
            print(f"\n== {place}\n{text}")


if __name__ == "__main__":
    main()
