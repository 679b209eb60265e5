"""Base classes of all documents: frozen models that are read, checked and written as a whole. Also the largest numbers
that a file may contain, which are well above any real run.

A larger number is a typing error or an attack. Without these bounds it would cause a search of the planner without end,
exhausted memory, or an overflow in code that computes with the number.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import textwrap
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema

from hpctrain.base.atomic import write_json
from hpctrain.base.errors import FieldError, FileError
from hpctrain.base.json_text import JsonError, parse_json
from hpctrain.records.format.input_file import DOCUMENT_BYTES, read_input_text
from hpctrain.records.format.validation_errors import validation_errors

LAYERS_MAX = 4096
"""Most blocks of a model. The deepest published models have about a thousand; a plan for 4096 is found in seconds."""
WIDTH_MAX = 2**22
"""Most numbers in a row of a weight matrix."""
HEADS_MAX = 2**16
"""Most attention heads of a block."""
VOCAB_MAX = 2**24
"""Most tokens of a vocabulary; the largest published vocabularies have about a million."""
SEQ_MAX = 2**24
"""Most tokens in a sequence."""
BATCH_MAX = 2**18
"""Most sequences in a global batch. The largest published ones have 65,536; a plan for 2^18 is found in seconds."""
TOKENIZER_BYTES = 256 * 2**20
"""Most bytes of a tokenizer.json; the largest published ones have about 30 MB."""
STEPS_MAX = 10**9
"""Most optimizer steps of a run, also for settings that are counted in steps."""
DEVICES_MAX = 2**20
"""Most devices of a run."""


Self = TypeVar("Self", bound="Document")


Item = TypeVar("Item")
OneOrSeveral = Annotated[list[Item], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""Type of a list in a file; in place of the list, the file may have a single text, which stands for a list of one."""


class Part(BaseModel):
    """Base class of models of files and of their parts. They are frozen; unknown keys and numbers that are not finite
    are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)

    later_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that are not written while they have their default. A field that is added to a model whose hash is stored
    is named here: without its key, older files and their hashes keep their meaning."""

    def to_json(self) -> dict[str, Any]:
        """Return the model as a mapping of plain JSON values with the keys of the file. A field that is None by default
        and has no value, such as a number that was not measured, has no key."""
        return self.model_dump(mode="json", by_alias=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        _describe_fields(cls, handler.resolve_ref_schema(schema).get("properties", {}))
        return schema

    @model_serializer(mode="wrap")
    def _without_absent(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the serialised fields without those that are None by default, and without `later_fields` that have
        their default. A None stays where the default is another value, because without its key the field would be read
        back as the default."""
        values: dict[str, Any] = handler(self)
        for name, field in type(self).model_fields.items():
            if getattr(self, name) == field.default and (field.default is None or name in self.later_fields):
                values.pop(field.alias or name, None)
                values.pop(name, None)
        return values


class Document(Part):
    """Base class of models of a whole file, or of a line of a .jsonl file. The key `schema` states the kind and version
    of the file."""

    schema_kind: ClassVar[str]

    schema_: str = ""
    """Kind and version of the file. hpctrain always writes it; a file that you write may leave it out."""

    model_config = ConfigDict(alias_generator=lambda name: "schema" if name == "schema_" else name)

    @model_validator(mode="before")
    @classmethod
    def _check_schema(cls, values: Any) -> Any:
        """Refuse a file of another kind by its schema alone, before each of its keys becomes an error."""
        stated = values.get("schema", values.get("schema_")) if isinstance(values, dict) else None
        if stated and isinstance(stated, str) and stated != cls._schema():
            raise ValueError(f"schema: found {stated!r}; this version reads {cls._schema()!r}")
        return values

    def model_post_init(self, context: Any) -> None:
        if not self.schema_:
            object.__setattr__(self, "schema_", self._schema())

    @classmethod
    def _schema(cls) -> str:
        return f"hpctrain.{cls.schema_kind}/v1"

    def sha256(self) -> str:
        """Return the SHA-256 of the content in hexadecimal digits, independent of white space and key order."""
        return content_sha256(self)

    def write(self, path: Path) -> None:
        """Write the document to the file at `path`, atomically.

        Raises:
            StorageError: the file cannot be written.
        """
        write_json(path, self.to_json())

    @classmethod
    def read(cls: type[Self], path: Path, *, owned: bool = False) -> Self:
        """Return the document in the file at `path`, after checking it.

        Args:
            owned: require that the file and its folder belong to this user, as in a run folder.

        Raises:
            FileError: the file is missing, unreadable, too large, not JSON, or has errors; all are listed.
            UntrustedError: with `owned`, the file or its folder belongs to somebody else, or others can write to one of
                them.
        """
        return cls.from_json(read_json(path, owned=owned), str(path))

    @classmethod
    def from_json(cls: type[Self], value: Any, source: str = "<json>") -> Self:
        """Return the document made from plain JSON values.

        Args:
            source: name of the values in errors, such as the path of their file.

        Raises:
            FileError: the values have errors; all are listed.
        """
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise FileError(source, validation_errors(error, cls)) from None


def content_sha256(part: Part) -> str:
    """Return the SHA-256 of a model's content in hexadecimal digits, independent of white space and key order."""
    return hashlib.sha256(json.dumps(part.to_json(), sort_keys=True).encode()).hexdigest()


def read_json(path: Path, limit_bytes: int = DOCUMENT_BYTES, *, owned: bool = False) -> Any:
    """Return the JSON value in the file at `path`.

    Args:
        limit_bytes: largest size of the file.
        owned: require that the file and its folder belong to this user, as in a run folder.

    Raises:
        FileError: the file is missing, unreadable, too large, empty, or not JSON.
        UntrustedError: with `owned`, the file or its folder belongs to somebody else, or others can write to one of
            them.
    """
    text = read_input_text(path, limit_bytes, owned=owned)
    if not text.strip():
        raise FileError(path, [FieldError("", "the file is empty, expected JSON")])
    try:
        return parse_json(text)
    except JsonError as error:
        raise FileError(path, [FieldError("", f"not valid JSON: {error}", error.line)]) from None


def _describe_fields(model: type[BaseModel], properties: dict[str, Any]) -> None:
    """Add the string below each field of `model` as its description to the `properties` of a JSON schema. An existing
    description stays.

    Pydantic can read these strings itself, but then reads them for every class that is loaded. That takes a third of
    the load time of the records, in each command and on each node, and only `hpctrain schema` prints the strings.
    """
    for owner in model.__mro__:
        if not issubclass(owner, BaseModel) or owner is BaseModel:
            continue
        for name, meaning in _docstrings(owner).items():
            field = model.model_fields.get(name)
            entry = None if field is None else properties.get(field.alias or name)
            if entry is not None:
                entry.setdefault("description", meaning)


@functools.cache
def _docstrings(owner: type) -> dict[str, str]:
    """Return name of a field -> the string below the field in the source of the class `owner`. The result is empty if
    hpctrain is installed without sources."""
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
