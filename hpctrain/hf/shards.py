"""Distributes the tensors of a folder over files of limited size; pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hpctrain.base.errors import InputError
from hpctrain.hf.tensors import HfTensor

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Type of an export -> bytes of a number."""
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def shard_bytes(text: str) -> int:
    """Return the bytes that '5GB' or '500MiB' stands for.

    Raises:
        InputError: the text is no size.
    """
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    size = int(float(parts[1]) * _UNITS.get(parts[2].upper(), 0)) if parts else 0
    if size < 1:
        raise InputError(f"--max-shard-size {text}: allowed: a number with KB, MB, GB, KiB, MiB or GiB, as 5GB")
    return size


def assign_to_shards(tensors: Sequence[HfTensor], bytes_per_value: int, limit: int) -> dict[str, list[HfTensor]]:
    """Return the tensors by file, in their order; a file exceeds `limit` bytes only where a single tensor does."""
    groups: list[list[HfTensor]] = []
    room = 0
    for tensor in tensors:
        size = tensor.count * bytes_per_value
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(tensor)
        room -= size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {f"model-{number:05d}-of-{count:05d}.safetensors": group for number, group in enumerate(groups, 1)}


def index_of(files: dict[str, list[HfTensor]], bytes_per_value: int) -> dict[str, Any]:
    """Return the content of model.safetensors.index.json."""
    total = sum(tensor.count for group in files.values() for tensor in group)
    return {
        "metadata": {"total_parameters": total, "total_size": total * bytes_per_value},
        "weight_map": {tensor.name: name for name, group in files.items() for tensor in group},
    }
