"""Counts the code lines of the package by room: docstrings, comments and blank lines are left out.

    python tools/count_code.py [REVISION …]

A text below a field or a constant counts as a docstring. Without a revision, the files as they are now are counted.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
"""Kinds of tokens that are no code."""


def code_lines(source: str) -> int:
    """Return the number of lines of a Python source on which a token of code begins; docstrings do not count."""
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return len({token.start[0] for token in tokens if token.type not in IGNORED} - texts)


def files(revision: str | None) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of each Python file of the package.

    Args:
        revision: a revision of git; None: the files as they are now.

    Raises:
        subprocess.CalledProcessError: git does not know the revision.
    """
    if revision is None:
        for path in sorted((ROOT / "hpctrain").rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()
        return
    archive = subprocess.run(["git", "archive", revision, "hpctrain"], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.name.endswith(".py") else None
            if content is not None:
                yield member.name, content.read().decode()


def main() -> None:
    """Print for each revision the code lines of each room and their sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revisions", nargs="*", default=[None])
    for revision in parser.parse_args().revisions:
        rooms: Counter[str] = Counter()
        count = 0
        for path, source in files(revision):
            rooms[path.split("/")[1]] += code_lines(source)
            count += 1
        for room, lines in rooms.most_common():
            print(f"{lines:7,} {room}")
        print(f"{rooms.total():7,} in {count} files of {revision or 'the working tree'}")


if __name__ == "__main__":
    main()
