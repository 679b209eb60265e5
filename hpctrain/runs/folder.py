"""The run folder, which holds every file about a run. It is created once, checked before it is used, and locked while a
run uses it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from io import FileIO
from pathlib import Path
from typing import Any

import yaml

from hpctrain.base.atomic import append_line, storage_errors, write_text
from hpctrain.base.errors import FieldError, FileError, InputError
from hpctrain.base.output_streams import first_control_character
from hpctrain.base.owned_files import OwnedFolder, open_owned, owner_only
from hpctrain.checkpoint.published import listed
from hpctrain.records.format.input_file import read_jsonl
from hpctrain.records.history.ledger import ExitClass
from hpctrain.records.history.run_log import Event, EventKind
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Topology
from hpctrain.runs.fault_fields import attempt_fault_fields


@dataclass(frozen=True)
class RunFolder:
    """A run's folder on disk."""

    path: Path

    def attempts(self) -> list[dict[str, Any]]:
        """Return the lines of attempts.jsonl.

        Raises:
            FileError: a line is no attempt.
        """
        path = self.path / "attempts.jsonl"
        lines = read_jsonl(path)
        for number, line in enumerate(lines, start=1):
            if not isinstance(line, dict):
                raise FileError(path, [FieldError("", "is no attempt; remove the line", number)])
        return lines

    def begin_attempt(self, nodes: list[str], now: float, job_id: str | None = None, restarts: int = 0) -> int:
        """Add a line to attempts.jsonl for a new attempt, and return the attempt's number."""
        attempts = self.attempts()
        number = len(attempts)
        line = {
            "attempt": number, "job_id": job_id, "restarts": restarts, "nodes": nodes, "start": now,
            "checkpoint_before": self.newest_checkpoint(),
        }  # fmt: skip
        self._write_attempts([*attempts, line])
        return number

    def open_attempts(self) -> list[dict[str, Any]]:
        """Return the lines of attempts that still run, or were killed before their line was completed."""
        return [line for line in self.attempts() if "end" not in line]

    def end_attempt(
        self,
        number: int,
        now: float,
        reason: str,
        code: int | None,
        exit_class: ExitClass,
        events: Sequence[Event] = (),
    ) -> None:
        """Complete an attempt's line in attempts.jsonl with its end, reason, exit code, exit class and faults.

        Args:
            code: exit code; None where it is unknown.
            events: events of the attempt, for its fault fields.
        """
        attempts = self.attempts()
        ended = {"end": now, "class": exit_class, "reason": reason, "checkpoint_after": self.newest_checkpoint()}
        seen = ({} if code is None else {"code": code}) | attempt_fault_fields(events, attempts[:number])
        attempts[number] = {**attempts[number], **ended, **seen}
        self._write_attempts(attempts)

    def append_event(self, kind: EventKind, reason: str, attempt: int, now: float, node: str = "", **data: Any) -> None:
        """Append an event that no agent writes to events.jsonl.

        Args:
            now: seconds since 1970.
            node: name of the node; default: that of this machine.

        Raises:
            StorageError: the file cannot be written.
        """
        node = node or platform.node()
        event = Event(kind=kind, time_s=now, attempt=attempt, generation=-1, node=node, reason=reason, data=data)
        append_line(self.path / "events.jsonl", json.dumps(event.to_json(), allow_nan=False))

    def newest_checkpoint(self) -> str | None:
        """Return the name of the run's newest published checkpoint."""
        checkpoints = listed(self.path / "checkpoints")
        return checkpoints[-1].name if checkpoints else None

    def _write_attempts(self, attempts: list[dict[str, Any]]) -> None:
        write_text(self.path / "attempts.jsonl", "".join(json.dumps(line) + "\n" for line in attempts))


def create_run_folder(base: Path, run: Run, topology: Topology | None, plan: Plan | None, now: float) -> RunFolder:
    """Create runs/<name>-<UTC time>-<4 hex>/ with the resolved run file, and topology and plan if given.

    Raises:
        InputError: a run folder cannot have this path.
        StorageError: it cannot be written.
    """
    stamp = datetime.fromtimestamp(now, timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    path = base.resolve() / f"{run.name}-{stamp}-{secrets.token_hex(2)}"
    check_path(path)
    # Mode 0700 from the first moment: it protects the key, logs and pickles in the folder.
    with storage_errors(path), owner_only():
        path.mkdir(parents=True, mode=0o700)
        with contextlib.suppress(OSError):
            # A default ACL of the parent folder would apply to all files that are created here, whatever the umask.
            os.removexattr(path, "system.posix_acl_default")
        for name in ("checkpoints", "generations", "logs"):
            (path / name).mkdir()
        write_text(path / "run.yaml", render_run(run))
        # Whoever can read the key can talk to the agents.
        write_text(path / "key", secrets.token_hex(32) + "\n", mode=0o600)
        if topology is not None:
            topology.write(path / "topology.json")
        if plan is not None:
            plan.write(path / "plan.json")
    return RunFolder(path)


def check_path(path: Path) -> None:
    """Check the path of a run folder, which appears in a job script, in records and on terminals.

    Raises:
        InputError: it holds a line break or another control character.
    """
    character = first_control_character(str(path))
    if character is not None:
        raise InputError(
            f"{path}: holds the control character {character}, which the path of a run folder must not; rename the "
            "folder, or name another one with HPCTRAIN_RUNS"
        )


@contextlib.contextmanager
def remove_on_error(folder: RunFolder) -> Iterator[None]:
    """Remove a new run folder if the `with` block fails: it would hide the earlier run of that name."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise


def render_run(run: Run) -> str:
    """Return the run file as YAML text, every key written out."""
    text: str = yaml.safe_dump(run.to_json(), sort_keys=False, allow_unicode=True, width=120)
    return text


LOCK_FILE = "run.lock"
"""File in a run folder that the processes of the run hold a lock on."""


def lock_run_folder(path: Path) -> FileIO:
    """Lock the run folder at `path` and return the open lock file, which holds the lock until it is closed.

    Node processes inherit its descriptor and then hold the lock too: the kernel frees it when the last of these
    processes has ended, however it ended.

    Raises:
        InputError: another run uses the folder, or others can write to it.
        StorageError: the lock file cannot be written.
    """
    with storage_errors(path / LOCK_FILE), OwnedFolder(path) as folder:
        lock = FileIO(folder.open_to_write(LOCK_FILE), "r+")
    if not _try_lock(lock.fileno()):
        holder = _read_holder(lock.fileno())
        lock.close()
        raise InputError(
            f"{path}: the run folder is in use{f' by {holder}' if holder else ''}; wait for that run to end, "
            "or stop it first"
        )
    lock.truncate(0)
    lock.write(f"{os.getpid()} {platform.node()}\n".encode())
    return lock


def resume_text(path: Path) -> str:
    """Return what a resumed run would start from, as a sentence."""
    name = RunFolder(path).newest_checkpoint()
    if name is None:
        return "there is no checkpoint yet, nothing was saved"
    return f"the newest checkpoint is that of step {int(name.rpartition('-')[2])}"


def newest_plan(path: Path) -> Path | None:
    """Return the path of the newest plan that people may read: the newest plan-<n>.json, else plan.json."""
    numbered = [(int(file.stem[5:]), file) for file in path.glob("plan-*.json") if file.stem[5:].isdigit()]
    if numbered:
        return max(numbered)[1]
    return path / "plan.json" if (path / "plan.json").exists() else None


@dataclass(frozen=True)
class LockHolder:
    """The process that locked a run folder. On a shared file system it may run on another machine."""

    pid: int
    host: str

    @property
    def is_here(self) -> bool:
        """Whether the process runs on this machine."""
        return self.host == platform.node()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def lock_holder(path: Path) -> LockHolder | None:
    """Return the living process that locked the folder; None if nobody holds it."""
    _, holder = _look_at_lock(path)
    if holder is not None and holder.is_here and not Path(f"/proc/{holder.pid}").exists():
        return None
    return holder


def is_locked(path: Path) -> bool:
    """Whether any process holds the lock, even if the one that took it has ended and its children go on."""
    return _look_at_lock(path)[0]


def _look_at_lock(path: Path) -> tuple[bool, LockHolder | None]:
    """Return whether the folder is locked, and the process that locked it as far as the lock file names it."""
    try:
        descriptor = open_owned(path / LOCK_FILE)
    except FileNotFoundError:
        return False, None
    try:
        # A shared lock, as NFS gives an exclusive one only to those who may write.
        locked = not _try_lock(descriptor, fcntl.LOCK_SH)
        return locked, _read_holder(descriptor) if locked else None
    finally:
        os.close(descriptor)


def _read_holder(descriptor: int) -> LockHolder | None:
    """Return the process that the lock file names."""
    pid, _, host = os.pread(descriptor, 512, 0).decode(errors="replace").strip().partition(" ")
    return LockHolder(int(pid), host) if pid.isdecimal() and host else None


def _try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Take the lock and return whether that worked. It tries twice, because `hpctrain status` holds the lock for an
    instant to check whether it is free."""
    for delay_s in (0.1, 0.0):
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(delay_s)
        else:
            return True
    return False


def check_trusted(path: Path) -> None:
    """Check the run folder, and everything in it that is executed, before anything in it is used.

    Raises:
        InputError: something belongs to somebody else, others can write to it, or others can read the key.
    """
    try:
        with OwnedFolder(path) as folder:
            folder.check_entries()
            with contextlib.suppress(FileNotFoundError):
                os.close(folder.open("key", private=True))
            for name in ("code", "submitit"):
                with contextlib.suppress(FileNotFoundError):
                    folder.check_tree(name, no_links=(".pkl",))
    except OSError as error:
        raise InputError(f"{path}: cannot be looked at ({error.strerror})") from None
