"""sweep.json: the runs of a sweep, which were submitted together as the tasks of one job array."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hpctrain.records.format.document import Document, Part
from hpctrain.records.format.file_name import PlainName

SWEEP_FILE = "sweep.json"
"""Name of the file in the folder of a sweep."""
RUNS_MAX = 1000
"""Most runs of a sweep; Slurm's default allows 1001 tasks in a job array."""


class SweptRun(Part):
    """A run of a sweep. Its number in the list of runs is the number of its task in the job array."""

    name: str
    """Name of the run."""
    folder: PlainName
    """Name of the run folder, which lies beside the folder of the sweep."""
    settings: dict[str, str]
    """Keys of the run file that the sweep sets, and their values in this run, as they were given."""


class Sweep(Document):
    """The runs of a sweep, in the order of their tasks."""

    schema_kind: ClassVar[str] = "sweep"

    name: str
    """Name of the sweep: that of the run file."""
    array_limit: int | None = Field(default=None, ge=1)
    """Most runs that train at once; absent: as many as Slurm starts."""
    runs: list[SweptRun] = Field(min_length=1, max_length=RUNS_MAX)
    """The runs, in the order of the tasks of the job array."""
