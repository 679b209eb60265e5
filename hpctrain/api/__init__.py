"""hpctrain for Python programs and notebooks: the work of the commands as functions, and runs as objects.

The functions raise the exceptions of hpctrain, end no process and print nothing. torch is imported when a checkpoint
is loaded, and not before.
"""

from hpctrain.api.commands import cancel, plan, probe, submit, wait
from hpctrain.api.loaded_run import LoadedRun, load_run
from hpctrain.api.sweep import load_sweep, submit_sweep
from hpctrain.api.training import resume, train
from hpctrain.base.errors import (
    CheckpointError,
    CommandError,
    FileError,
    HpctrainError,
    InputError,
    RefusedError,
    StorageError,
    UntrustedError,
    WaitTimeoutError,
)
from hpctrain.records.plan.plan import Plan
from hpctrain.records.topology.topology import Topology
from hpctrain.report.status import RunStatus

__all__ = [
    # runs
    "load_run",
    "load_sweep",
    "LoadedRun",
    "RunStatus",
    # work
    "probe",
    "plan",
    "submit",
    "submit_sweep",
    "train",
    "resume",
    "wait",
    "cancel",
    # files
    "Topology",
    "Plan",
    # errors
    "HpctrainError",
    "InputError",
    "FileError",
    "UntrustedError",
    "RefusedError",
    "CommandError",
    "StorageError",
    "CheckpointError",
    "WaitTimeoutError",
]
