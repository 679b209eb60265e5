"""tracking/NAME.json: how far a run's metrics were written into a tracker."""

from __future__ import annotations

from typing import ClassVar

from hpctrain.records.format.document import Document


class Tracked(Document):
    """How far a tracker has come with a run's metrics."""

    schema_kind: ClassVar[str] = "tracked"

    output: str
    """Folder with the tracker's files."""
    until_s: float
    """`time_s` of the last row of metrics.jsonl that was written; seconds since 1970."""
