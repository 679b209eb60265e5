"""What `status` says of checkpoints that find no room."""

from __future__ import annotations

import pytest

from hpctrain.records.history.run_log import Event, EventKind
from hpctrain.report.status import disk_warning


def event(kind: EventKind, reason: str = "", **data: object) -> Event:
    return Event(time_s=0, attempt=0, generation=0, node="n0", kind=kind, reason=reason, data=data)


SAVED = event("checkpoint_saved", step=16, size_bytes=3 << 20)
SKIPPED = event("checkpoint_skipped", "step 24 not saved: no room", step=24)


@pytest.mark.parametrize(
    ("events", "free", "warning"),
    [
        ([], 0, None),
        ([SAVED], None, None),
        ([SAVED], 3 << 20, None),
        ([SKIPPED, SAVED], 4 << 20, None),
        ([SAVED, SKIPPED], None, "step 24 not saved: no room; the newest checkpoint is that of step 16"),
        ([SKIPPED], 0, "step 24 not saved: no room; no checkpoint was saved yet"),
        (
            [SAVED], 1 << 20,
            "1.0 MiB are free where the run folder lies, and the next checkpoint takes 3.0 MiB: free some space",
        ),
        # Of a checkpoint that was passed over for what is in it, room says nothing.
        ([SAVED, event("checkpoint_skipped", "step-00000024: manifest.json is missing", path="x")], None, None),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_and_nothing_else(events: list[Event], free: int | None, warning: str | None) -> None:
    assert disk_warning(events, free) == warning
