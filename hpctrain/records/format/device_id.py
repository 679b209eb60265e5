"""The name of a device in every file: `node:device`."""

from __future__ import annotations

from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


class DeviceId(str):
    """A device's name, written `node:device`, as `node3:cuda0`. It compares and is stored as its text."""

    node: str
    device: str
    """The device's name within its node; empty where the text has no ':'."""

    def __new__(cls, text: str) -> DeviceId:
        made = super().__new__(cls, text)
        made.node, _, made.device = text.partition(":")
        return made

    @classmethod
    def of(cls, node: str, device: str) -> DeviceId:
        """Return the device id of a node's device."""
        return cls(f"{node}:{device}")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls, core_schema.str_schema())
