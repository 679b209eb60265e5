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

from hpctrain import __version__
from hpctrain.base.atomic import append_line, storage_errors, write_text
from hpctrain.base.errors import CommandError, InputError
from hpctrain.base.output_streams import first_control_character
from hpctrain.base.owned_files import OwnedFolder, open_owned, owner_only
from hpctrain.checkpoint.published import listed, step_of
from hpctrain.records.format.input_file import read_jsonl
from hpctrain.records.history.ledger import ExitClass
from hpctrain.records.history.run_log import Event, EventKind
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Topology
from hpctrain.runs.fault_fields import attempt_fault_fields


@dataclass(frozen=True)
class RunFolder:
    """A run's folder on disk, with methods for its records of attempts and events."""

    path: Path

    def attempts(self) -> list[dict[str, Any]]:
        """Return the parsed lines of attempts.jsonl, one for each attempt, oldest first.

        Raises:
            FileError: the file cannot be read.
            UntrustedError: the file or the run folder belongs to somebody else, or others can write to it.
        """
        return read_jsonl(self.path / "attempts.jsonl")

    def begin_attempt(
        self, nodes: list[str], now: float, job_id: str | None = None, restarts: int = 0, shared: bool = False
    ) -> int:
        """Add a line to attempts.jsonl for a new attempt, and return the attempt's number, which counts from 0. In the
        line is this process's version of hpctrain, which every node of the attempt must have.

        Args:
            nodes: names of the attempt's nodes.
            now: seconds since 1970.
            job_id: id of the Slurm job; None for a local run.
            restarts: how often Slurm has requeued the job.
            shared: whether other jobs may run on the nodes.

        Raises:
            FileError, UntrustedError: attempts.jsonl cannot be read, or is not trusted.
            StorageError: attempts.jsonl cannot be written.
        """
        attempts = self.attempts()
        number = len(attempts)
        line = {
            "attempt": number, "job_id": job_id, "restarts": restarts, "nodes": nodes, "start": now,
            "hpctrain": __version__, "checkpoint_before": self.newest_checkpoint(),
        } | ({"shared": True} if shared else {})  # fmt: skip
        self._write_attempts([*attempts, line])
        return number

    def open_attempts(self) -> list[dict[str, Any]]:
        """Return the lines of attempts.jsonl without an end: attempts that still run, or were killed before their line
        was completed. Raises what `attempts` raises."""
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
        """Complete an attempt's line in attempts.jsonl with its end, reason, exit code, exit class, newest checkpoint
        and faults.

        Args:
            number: number of the attempt.
            now: the attempt's end, in seconds since 1970.
            reason: one line that says why the attempt ended.
            code: exit code of the attempt; None if it is unknown, and then not written.
            events: events of the attempt, in which its faults are searched.

        Raises:
            FileError, UntrustedError: attempts.jsonl cannot be read, or is not trusted.
            IndexError: attempts.jsonl has no line of this attempt.
            StorageError: attempts.jsonl cannot be written.
        """
        attempts = self.attempts()
        ended = {"end": now, "class": exit_class, "reason": reason, "checkpoint_after": self.newest_checkpoint()}
        seen = ({} if code is None else {"code": code}) | attempt_fault_fields(events, attempts[:number])
        attempts[number] = {**attempts[number], **ended, **seen}
        self._write_attempts(attempts)

    def append_event(self, kind: EventKind, reason: str, attempt: int, now: float, node: str = "", **data: Any) -> None:
        """Append an event to events.jsonl for a process that is no agent. The event has the generation -1.

        Args:
            reason: one sentence for the user.
            attempt: number of the attempt.
            now: seconds since 1970.
            node: name of the node; '': that of this machine.
            data: further fields of the event.

        Raises:
            StorageError: events.jsonl cannot be written.
        """
        node = node or platform.node()
        event = Event(kind=kind, time_s=now, attempt=attempt, generation=-1, node=node, reason=reason, data=data)
        append_line(self.path / "events.jsonl", json.dumps(event.to_json(), allow_nan=False))

    def newest_checkpoint(self) -> str | None:
        """Return the name of the newest complete folder in the run's `checkpoints`, such as step-00000100; None without
        one. Its files are not verified."""
        checkpoints = listed(self.path / "checkpoints")
        return checkpoints[-1].name if checkpoints else None

    def _write_attempts(self, attempts: list[dict[str, Any]]) -> None:
        write_text(self.path / "attempts.jsonl", "".join(json.dumps(line) + "\n" for line in attempts))


def create_run_folder(base: Path, run: Run, topology: Topology | None, plan: Plan | None, now: float) -> RunFolder:
    """Create the run folder <base>/<run's name>-<UTC time>-<4 hex digits> with the resolved run file, a key for the
    agents, and topology and plan if given.

    Args:
        now: seconds since 1970.

    Raises:
        InputError: the path holds a control character.
        StorageError: the run folder cannot be written.
    """
    path = new_folder(base, run.name, now, "checkpoints", "generations", "logs")
    with storage_errors(path), owner_only():
        write_text(path / "run.yaml", render_run(run))
        # Whoever can read the key can talk to the agents.
        write_text(path / "key", secrets.token_hex(32) + "\n", mode=0o600)
        if topology is not None:
            topology.write(path / "topology.json")
        if plan is not None:
            plan.write(path / "plan.json")
    return RunFolder(path)


def new_folder(base: Path, name: str, now: float, *folders: str) -> Path:
    """Create the folder <base>/<name>-<UTC time>-<4 hex digits> with empty `folders` in it, for its owner alone, and
    return its path.

    Raises:
        InputError: the path holds a control character.
        StorageError: the folder cannot be written.
    """
    stamp = datetime.fromtimestamp(now, timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    path = base.resolve() / f"{name}-{stamp}-{secrets.token_hex(2)}"
    check_path(path)
    # Mode 0700 from the first moment: it protects the key, logs and pickles in the folder.
    with storage_errors(path), owner_only():
        path.mkdir(parents=True, mode=0o700)
        with contextlib.suppress(OSError):
            # A default ACL of the parent folder would apply to all files that are created here, whatever the umask.
            os.removexattr(path, "system.posix_acl_default")
        for folder in folders:
            (path / folder).mkdir()
    return path


def check_path(path: Path) -> None:
    """Check that the path of a run folder has no control characters, because job scripts, records and terminals show
    the path.

    Raises:
        InputError: the path holds a line break or another control character.
    """
    character = first_control_character(str(path))
    if character is not None:
        raise InputError(
            f"{path}: holds the control character {character}, which the path of a run folder must not; rename the "
            "folder, or name another one with HPCTRAIN_RUNS"
        )


class KeptFolderError(CommandError):
    """The submission of a new run failed, but its folder must stay, because Slurm may have a job that uses it."""


@contextlib.contextmanager
def remove_on_error(folder: RunFolder) -> Iterator[None]:
    """Remove a new run folder, or the folder of a sweep, if the `with` block fails. If the folder stayed, commands
    would find it by the run's name, instead of an earlier run of the same name. It stays only after a
    KeptFolderError."""
    try:
        yield
    except KeptFolderError:
        raise
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise


def render_run(run: Run) -> str:
    """Return the run as the YAML text of a run file, with every key written out."""
    text: str = yaml.safe_dump(run.to_json(), sort_keys=False, allow_unicode=True, width=120)
    return text


LOCK_FILE = "run.lock"
"""File in a run folder that is locked while a local run uses the folder. It names the process that took the lock."""


def lock_run_folder(path: Path) -> FileIO:
    """Lock the run folder at `path` and return the open lock file, which holds the lock until it is closed.

    Node processes that inherit the file's descriptor hold the lock too. The kernel frees the lock when the last of
    these processes has ended, even if it was killed.

    Raises:
        InputError: another process holds the lock, or the folder or the lock file is untrusted.
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
    """Return a clause that says from which checkpoint the run in the folder `path` would continue, or that there is no
    checkpoint."""
    checkpoints = listed(path / "checkpoints")
    if not checkpoints:
        return "there is no checkpoint yet, nothing was saved"
    return f"the newest checkpoint is that of step {step_of(checkpoints[-1])}"


def newest_plan(path: Path) -> Path | None:
    """Return the path of the newest plan in the run folder `path` that people may edit: the plan-<n>.json with the
    largest number, else plan.json; None if there is neither."""
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
        """Whether the process that locked the run folder runs on this machine."""
        return self.host == platform.node()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def lock_holder(path: Path) -> LockHolder | None:
    """Return the process that locked the run folder `path`; None if the folder is not locked, or if that process has
    ended on this machine.

    Raises:
        UntrustedError: the folder or its lock file belongs to somebody else, or others can write to it.
        OSError: the lock file cannot be opened, although it is there.
    """
    _, holder = _look_at_lock(path)
    if holder is not None and holder.is_here and not Path(f"/proc/{holder.pid}").exists():
        return None
    return holder


def is_locked(path: Path) -> bool:
    """Return whether any process holds the lock of the run folder `path`: the process that took the lock, or a child
    that inherited it.

    Raises:
        UntrustedError: the folder or its lock file belongs to somebody else, or others can write to it.
        OSError: the lock file cannot be opened, although it is there.
    """
    return _look_at_lock(path)[0]


def _look_at_lock(path: Path) -> tuple[bool, LockHolder | None]:
    """Return whether the run folder is locked, and the process that the lock file then names; None without a name."""
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
    """Return the process that the open lock file names; None if it names none."""
    pid, _, host = os.pread(descriptor, 512, 0).decode(errors="replace").strip().partition(" ")
    return LockHolder(int(pid), host) if pid.isdecimal() and host else None


def _try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock the open file without waiting, and return whether that worked. The function tries twice, because `hpctrain
    status` holds the lock for an instant to check whether it is free.

    Args:
        kind: LOCK_EX or LOCK_SH of flock(2).
    """
    for delay_s in (0.1, 0.0):
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(delay_s)
        else:
            return True
    return False


def check_trusted(path: Path) -> None:
    """Check that nobody but this user can change the run folder or what is executed from it, and that nobody else can
    read its key.

    Raises:
        InputError: the folder or something in it belongs to another user, others can write to it, or others can read
            the key.
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
