"""Reads the docstrings below a class's fields, for a JSON Schema.

Pydantic can read them itself, but would do so for every class that is loaded. That takes a third of the records' load
time, in each command and on each node, and only `hpctrain schema` prints the texts.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from pydantic import BaseModel


def describe_fields(model: type[BaseModel], properties: dict[str, Any]) -> None:
    """Add each field's docstring to its entry in a schema's `properties`; an existing description stays."""
    for owner in model.__mro__:
        if not issubclass(owner, BaseModel) or owner is BaseModel:
            continue
        for name, meaning in _docstrings(owner).items():
            field = model.model_fields.get(name)
            entry = None if field is None else properties.get(field.alias or name)
            if entry is not None:
                entry.setdefault("description", meaning)


def _docstrings(owner: type) -> dict[str, str]:
    """Return field -> docstring below its definition in the class's source."""
    try:
        source = inspect.getsource(owner)
    except OSError:  # installed without sources
        return {}
    (definition,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, after in zip(definition.body, definition.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            docs[statement.target.id] = inspect.cleandoc(after.value.value)
    return docs
