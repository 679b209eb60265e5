"""What gloo itself reports to torch's profiler."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from torch.profiler import profile


def gloo_calls(trace: profile) -> list[tuple[str, list[list[int]]]]:
    """Its collectives in turn, with the shapes of their inputs; the trace was made with `record_shapes`.

    From the trace's file, as torch's own list first makes a tree of all operations, which takes seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    calls = [event for event in events if event.get("name", "").startswith("gloo:")]
    return [(call["name"].removeprefix("gloo:"), call["args"].get("Input Dims", [])) for call in calls]
