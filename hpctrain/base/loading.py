"""Modules are loaded with the garbage collector at rest."""

from __future__ import annotations

import gc
import importlib
from types import ModuleType


def load(module: str) -> ModuleType:
    """Import a module by its name.

    What libraries make while they are loaded stays. Looking through it for garbage again and again is a fifth of the
    processor time that loading torch takes, and nearly as much of a command's start.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if collecting:
            gc.enable()
