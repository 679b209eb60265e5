"""Imports modules with the garbage collector switched off, which is faster."""

from __future__ import annotations

import gc
import importlib
from types import ModuleType


def load(module: str) -> ModuleType:
    """Import a module by its name, with garbage collection off meanwhile, and return it.

    Libraries keep nearly all objects that they make while they load, so garbage collection finds little to free.
    Collection would take a fifth of the CPU time of loading torch, and nearly as large a share of the start of an
    hpctrain command.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if collecting:
            gc.enable()
