"""Messages between processes as models that are checked where they arrive."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from hpctrain.base.net.wire import MalformedMessage, Message

Whole = TypeVar("Whole")


def parse_message(adapter: TypeAdapter[Whole], message: Message) -> Whole:
    """Return the model that a message stands for.

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
