"""Reads the layer times and link bandwidths that Sailor's authors measured (Strati et al., SOSP 2025). They are in a
folder beside the table of runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.base.errors import InputError
from hpctrain.planner.devices.constants import ForwardBackward
from tools.published_runs.layer_profile import LayerProfile, LayerTimes

FOLDER = "sailor_profiles"
"""Name of the folder with Sailor's layer times and bandwidths."""
ZONE = "us-central1-a"
"""The cloud zone whose bandwidths are read; the file's entries for one zone describe one cluster."""


@dataclass(frozen=True)
class SailorFigures:
    """The figures in Sailor's folder; empty if there is no such folder."""

    profiles: dict[str, LayerProfile]
    """Name of a model -> its layer times."""
    bandwidths: dict[tuple[str, str, int], float]
    """(GPU of a node, GPU of another node, GPUs in use on each node) -> bytes per second between the two nodes."""

    def between(self, a: str, b: str, gpus: int) -> float | None:
        """Return the bytes per second between a node with GPUs `a` and a node with GPUs `b`; None if not measured.

        Args:
            gpus: GPUs in use on each node.
        """
        return self.bandwidths.get((a, b, gpus)) or self.bandwidths.get((b, a, gpus))


def read_figures(folder: Path) -> SailorFigures:
    """Return the layer times and bandwidths in Sailor's folder.

    Raises:
        InputError: a file has an unexpected form.
    """
    if not folder.is_dir():
        return SailorFigures({}, {})
    try:
        profiles = {path.name: _profile(path) for path in sorted(folder.iterdir()) if path.is_dir()}
        table = json.loads((folder / "multizone_bandwidths_het.json").read_text(encoding="utf-8"))
        return SailorFigures(profiles, _bandwidths(table))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{folder}: not layer profiles and bandwidths as Sailor publishes them: {error!r}") from None


def _profile(folder: Path) -> LayerProfile:
    times: dict[tuple[str, int, int], LayerTimes] = {}
    counts: dict[str, int] = {}
    for path in sorted(folder.glob("*.json")):
        by_size = json.loads(path.read_text(encoding="utf-8"))
        for size, by_tp in by_size.items():
            for tp, layers in by_tp.items():
                counts[path.stem] = len(layers)
                times[path.stem, int(tp), int(size)] = _times(layers)
    # A file whose number of layers differs from most files is of another model, published under this one's name.
    usual = max(counts.values(), key=list(counts.values()).count, default=0)
    kept = {key: value for key, value in times.items() if counts[key[0]] == usual}
    return LayerProfile({key: _smoothed(key, kept) for key in kept})


def _smoothed(key: tuple[str, int, int], times: dict[tuple[str, int, int], LayerTimes]) -> LayerTimes:
    """Return the layer times for a key, each at most that of larger micro-batches: a longer measured time was
    disturbed.

    Args:
        key: (GPU, tp, micro-batch size).
        times: all measured layer times by such keys.
    """
    larger = [other for (gpu, tp, size), other in times.items() if (gpu, tp) == key[:2] and size >= key[2]]

    def least(pairs: Sequence[ForwardBackward]) -> ForwardBackward:
        return min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)

    return LayerTimes(
        least([other.block for other in larger]),
        least([other.embedding for other in larger]),
        least([other.head for other in larger]),
        min(other.update for other in larger),
    )


def _times(layers: dict[str, list[float]]) -> LayerTimes:
    last = len(layers) - 1
    blocks = [layers[str(index)] for index in range(1, last)]
    mean = [sum(values) / len(blocks) for values in zip(*blocks, strict=True)]
    first, head = layers["0"], layers[str(last)]
    return LayerTimes((mean[0], mean[1]), (first[0], first[1]), (head[0], head[1]), mean[2])


def _bandwidths(table: dict[str, Any]) -> dict[tuple[str, str, int], float]:
    found = {}
    for a, by_count in table[ZONE].items():
        for gpus, zones in by_count.items():
            for b, by_other in zones.get(ZONE, {}).items():
                if gpus in by_other:
                    found[a, b, int(gpus)] = float(by_other[gpus][1])  # the limit of the fitted curve
    return found
