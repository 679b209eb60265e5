"""The record of one step: profile/step-*.spans.json says what each rank did, and when."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from hpctrain.records.format.document import STEPS_MAX, Document, Part
from hpctrain.records.format.node_name import DeviceId

FOLDER = "profile"
"""Name of the folder in a run folder."""
_FILE = re.compile(r"step-(\d{1,9})\.spans\.json")

Moment = Annotated[float, Field(ge=-1e7, le=1e7)]
SpanKind = Literal["compute", "device", "pp", "dp", "world", "hidden"]
"""What a span is. compute: work of the host. device: it waits for this rank's GPU. pp, dp, world: it waits for other
stages, for other replicas or shards, for all ranks. hidden: messages were under way while the rank computed."""


class RankSpans(Part):
    """What one rank did in the step."""

    rank: int = Field(ge=0)
    """Number of the rank in the plan."""
    device: DeviceId
    """Device of the rank, as in the plan: node:device."""
    spans: list[tuple[str, Moment, Moment, SpanKind]]
    """[name, start, end, kind] of each operation, as in `SpanKind`. Times are in seconds; 0 is the end of the step's
    all-gather of metrics, which all ranks leave within about the latency of a message. An operation may lie within
    another one."""


class StepSpans(Document):
    """profile/step-*.spans.json: what each rank did in one step, and when. Times are those of the host: on a GPU, an
    operation ends when it is queued."""

    schema_kind: ClassVar[str] = "step_spans"

    step: int = Field(ge=1, le=STEPS_MAX)
    """Number of the step."""
    generation: int
    """Number of the generation that made the step."""
    ranks: list[RankSpans]
    """All ranks, in order."""


def spans_file(folder: Path, step: int) -> Path:
    """Return the path of the record of a step in a run folder."""
    return folder / FOLDER / f"step-{step}.spans.json"


def recorded_steps(folder: Path) -> list[int]:
    """Return the steps of a run that were recorded, in ascending order."""
    names = (_FILE.fullmatch(path.name) for path in (folder / FOLDER).glob("step-*.spans.json"))
    return sorted(int(name[1]) for name in names if name)
