"""The language of the house: one name for one thing, no filler for a name, and rooms in which one finds a file."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

FILLERS = {"each", "found", "kept", "left", "mine", "own", "said", "told", "way"}
"""Words that say nothing of what a function or a class is."""
WATCHED_IN_LOCALS = {"found", "kept", "mine", "said", "told"}
"""Those that no parameter, attribute or local is named by either."""
MOST_FILES = 20
"""In a room, its `__init__` included; a larger one has sub-rooms."""


Names = list[tuple[str, str]]
"""Place and name."""


@pytest.fixture(scope="module")
def names(repository: Path) -> dict[str, Names]:
    """What the package names: classes, functions, and bindings (each parameter, attribute and local)."""
    named: dict[str, Names] = defaultdict(list)
    for path in sorted((repository / "hpctrain").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ClassDef(name=name):
                    kind = "classes"
                case ast.FunctionDef(name=name):
                    kind = "functions"
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                    kind = "bindings"
                case _:
                    continue
            named[kind].append((f"{path.relative_to(repository)}:{node.lineno}", name))
    return named


def test_a_public_class_has_a_name_of_its_own(names: dict[str, Names]) -> None:
    places = defaultdict(list)
    for place, name in names["classes"]:
        if not name.startswith("_"):
            places[name].append(place)
    assert len(places) > 400
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_function_or_class_is_named_by_a_filler(names: dict[str, Names]) -> None:
    definitions = names["classes"] + names["functions"]
    assert len(definitions) > 4000
    assert [definition for definition in definitions if definition[1].strip("_").lower() in FILLERS] == []


def test_no_parameter_attribute_or_local_is_named_by_a_filler(names: dict[str, Names]) -> None:
    assert len(names["bindings"]) > 10_000
    assert [binding for binding in names["bindings"] if binding[1].strip("_") in WATCHED_IN_LOCALS] == []


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
