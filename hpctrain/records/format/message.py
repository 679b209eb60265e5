"""Checks messages between processes: the receiver turns each message into a pydantic model."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from hpctrain.base.net.wire import MalformedMessage, Message

Whole = TypeVar("Whole")


def parse_message(adapter: TypeAdapter[Whole], message: Message) -> Whole:
    """Return a message, a mapping from JSON, as the model of its kind. `adapter` has the models of all kinds that the
    receiver accepts.

    Raises:
        MalformedMessage: the message does not fit any of the adapter's models.
    """
    try:
        return adapter.validate_python(message)
    except ValidationError as error:
        mistake: Any = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, mistake["loc"]))[:200]
        kind = str(message.get("kind"))[:100]
        where = f" in {field!r}" if field else ""
        raise MalformedMessage(f"it sent a malformed message {kind!r}:{where} {mistake['msg'][:200]!r}") from None
