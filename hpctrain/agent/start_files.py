"""What the workers of a generation need of the run folder before they can start: their plan, and their logs. Another
thread gets both, because the file system may hang."""

from __future__ import annotations

from concurrent.futures import Future
from typing import NamedTuple, Protocol

from hpctrain.agent.decide import Decision
from hpctrain.agent.generation_store import GenerationSource
from hpctrain.agent.group import WorkerLog
from hpctrain.base.errors import FileError, StorageError, UntrustedError
from hpctrain.base.helper_thread import Background
from hpctrain.records.history.generation import Generation
from hpctrain.records.plan.plan import Plan

PLAN_PATIENCE_S = 20.0
"""Seconds for which an agent tries again to read a plan or to open logs; then it ends, so that the others go on without
its node."""
AGAIN_AFTER_S = 0.5
"""Seconds from a failed try to the next one."""


class Logs(Protocol):
    """Where the workers' logs are opened (`WorkerGroup`)."""

    def open_logs(self, count: int) -> list[WorkerLog]:
        """Open the logs of `count` workers; raise StorageError if one cannot be written."""


class StartFiles(NamedTuple):
    """The plan of a generation, and a log for each of its workers on this node."""

    plan: Plan
    logs: list[WorkerLog]


class StartPreparation:
    """Gets the files for the start of one generation at a time."""

    def __init__(self, node: str, source: GenerationSource, logs: Logs, in_files: Background) -> None:
        """Prepare to get files.

        Args:
            node: this agent's node.
            in_files: reads plans and opens logs.
        """
        self._node = node
        self._source = source
        self._logs = logs
        self._in_files = in_files
        self._call: Future[StartFiles] | None = None
        self._wanted: tuple[Generation, Plan | None, bool] | None = None
        self._next_try = 0.0
        self._fails_since: float | None = None

    @property
    def is_pending(self) -> bool:
        """Whether `poll` is still to return the files of a generation."""
        return self._wanted is not None

    def begin(self, record: Generation, plan: Plan | None, is_member: bool) -> None:
        """Begin to get the files of a generation, and of no other one.

        Args:
            plan: the generation's plan, if this agent knows it already.
            is_member: whether this agent is a member of the generation; else it starts no workers.
        """
        self.cancel()
        self._wanted, self._next_try = (record, plan, is_member), float("-inf")

    def cancel(self) -> None:
        """Get no files any more, because the generation is over."""
        if self._call is not None:
            # A call that hangs opens the logs when nobody wants them any more.
            self._call.add_done_callback(_close_unused)
        self._call = self._wanted = None

    def poll(self, now: float) -> StartFiles | Decision | None:
        """Return the files, once for each generation; None before they are there, and afterwards. Return the decision
        to fail if the plan or the run folder is untrusted: no node may use it, so the others cannot go on either.

        Args:
            now: seconds of the agent's clock.

        Raises:
            FileError: no plan could be read for `PLAN_PATIENCE_S`.
            StorageError: the logs could not be opened for `PLAN_PATIENCE_S`.
        """
        if self._wanted is None:
            return None
        if self._call is None and now >= self._next_try:
            self._call = self._in_files(self._get, *self._wanted)
        if self._call is None or not self._call.done():
            return None
        call, self._call = self._call, None
        try:
            files = call.result()
        except UntrustedError as error:
            self._wanted = None
            return Decision("fail", str(error), exit_code=error.exit_code)
        except (FileError, StorageError) as error:
            if self._fails_since is None:
                self._fails_since = now
                print(f"hpctrain agent: generation {self._wanted[0].number} begins later: {error}", flush=True)
            if now - self._fails_since > PLAN_PATIENCE_S:
                raise
            self._next_try = now + AGAIN_AFTER_S
            return None
        self._wanted = self._fails_since = None
        return files

    def _get(self, record: Generation, plan: Plan | None, is_member: bool) -> StartFiles:
        plan = self._source.plan_of(record) if plan is None else plan
        workers = sum(device.node == self._node for device in plan.ranks) if is_member else 0
        return StartFiles(plan, self._logs.open_logs(workers))


def _close_unused(call: Future[StartFiles]) -> None:
    if not call.cancelled() and call.exception() is None:
        for log in call.result().logs:
            log.close()
