"""The language of the house: one name for one thing, no filler for a name, and rooms in which one finds a file."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

FILLERS = {"each", "found", "kept", "left", "mine", "own", "said", "told", "way"}
"""Words that say nothing of what a function or a class is."""
WATCHED_IN_LOCALS = {"found", "kept", "mine", "said", "told"}
"""Those that no parameter, attribute or local is named by either."""
MOST_FILES = 20
"""In a room, its `__init__` included; a larger one has sub-rooms."""


def definitions(repository: Path) -> Iterator[tuple[Path, ast.ClassDef | ast.FunctionDef]]:
    for path in sorted((repository / "hpctrain").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield path.relative_to(repository), node


def test_a_public_class_has_a_name_of_its_own(repository: Path) -> None:
    places = defaultdict(list)
    for path, node in definitions(repository):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            places[node.name].append(str(path))
    assert len(places) > 400
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_function_or_class_is_named_by_a_filler(repository: Path) -> None:
    named = [
        f"{path}: {node.name}" for path, node in definitions(repository) if node.name.strip("_").lower() in FILLERS
    ]
    assert named == []


def bindings(repository: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and name of each parameter, attribute and local that the package binds."""
    for path in sorted((repository / "hpctrain").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                    yield f"{path.relative_to(repository)}:{node.lineno}", name


def test_no_parameter_attribute_or_local_is_named_by_a_filler(repository: Path) -> None:
    named = [f"{place}: {name}" for place, name in bindings(repository) if name.strip("_") in WATCHED_IN_LOCALS]
    assert named == []


def test_no_room_has_more_files_than_one_can_look_through(repository: Path) -> None:
    rooms = [path.parent for path in (repository / "hpctrain").rglob("__init__.py")]
    sizes = {str(room.relative_to(repository)): len(list(room.glob("*.py"))) for room in rooms}
    assert {room: size for room, size in sizes.items() if size > MOST_FILES} == {}


def test_every_folder_with_modules_is_a_room_that_says_what_is_in_it(repository: Path) -> None:
    folders = {path.parent for path in (repository / "hpctrain").rglob("*.py")}
    silent = [str(folder) for folder in folders if not (folder / "__init__.py").is_file()]
    assert silent == []


def test_every_term_of_the_glossary_that_is_code_is_in_the_code(repository: Path) -> None:
    rows = [
        line.split("|")[1:3]
        for line in (repository / "docs/glossary.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    codes = {code for row in rows for cell in row for code in re.findall(r"`([A-Za-z_][\w.-]*)`", cell)}
    assert len(codes) > 70
    sources = " ".join(path.read_text() for path in (repository / "hpctrain").rglob("*.py"))
    written = set(re.findall(r"\w+", sources))
    assert {code for code in codes if not set(re.findall(r"\w+", code)) <= written} == set()
