"""A node's workers: what they are told, what they report, which end explains most, and that none is left."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import pytest
from direct_executor import DirectExecutor

from hpctrain.agent.group import KILL_WAIT_S, WorkerGroup, WorkerUpdate, event_of
from hpctrain.agent.worker_messages import (
    ChangePlanOrder,
    Compiling,
    ErrorDetails,
    Report,
    ResidualsDropped,
    StartOrder,
    StepDone,
    StopOrder,
    StoreConnection,
    WorkerError,
    WorkerReady,
)
from hpctrain.base.activity import Activity
from hpctrain.base.errors import EXIT_INFRASTRUCTURE, EXIT_NEW_PLAN
from hpctrain.base.net.wire import LineChannel
from hpctrain.base.process import WORKER, CommandResult

STORE = StoreConnection(addr="127.0.0.1", port=1, secret="secret")
ORDERS = [StartOrder(plan="plan.json", rank=rank, generation=2, store=STORE) for rank in (0, 5)]


def error(sentence: str, kind: Literal["error", "lost"] = "error", fault: str = "exception") -> WorkerError:
    details = ErrorDetails(kind="RuntimeError", message="CUDA error: …", step=3, operation="step 3")
    return WorkerError(kind=kind, sentence=sentence, fault=fault, details=details)


class FakeWorker:
    """A worker process: the test speaks for it through `channel` and decides when it ends."""

    def __init__(self, pid: int, argv: Sequence[str], env: Mapping[str, str], log: int, fds: Sequence[int]) -> None:
        self.pid = pid
        self.argv = list(argv)
        self.env = dict(env)
        self.log = Path(f"/proc/self/fd/{log}").readlink()
        self.fds = list(fds)
        # Inherited, as a child process would have it: the group closes its own copy.
        self.channel = LineChannel(socket.fromfd(fds[0], socket.AF_UNIX, socket.SOCK_STREAM))
        self.code: int | None = None
        self.killed = False
        self.waited = False

    def send(self, report: Report) -> None:
        self.channel.send(report.to_json())

    def ends(self, code: int) -> None:
        self.code = code
        self.channel.close()

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.killed = True

    def terminate(self) -> None:
        raise AssertionError("a group kills")

    def wait(self, timeout_s: float | None = None) -> int | None:
        self.waited = True
        if self.killed and self.code is None:
            self.ends(-9)
        return self.code


class FakeRunner:
    """Starts fake workers."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []

    def run(
        self, argv: Sequence[str], timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        raise AssertionError("a group starts processes and waits for none")

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        log: Path | int | None = None,
        keep_fds: Sequence[int] = (),
    ) -> FakeWorker:
        assert env is not None
        assert isinstance(log, int)
        self.workers.append(FakeWorker(100 + len(self.workers), argv, env, log, keep_fds))
        return self.workers[-1]

    def reap(self) -> None:
        pass


@pytest.fixture
def runner() -> Iterator[FakeRunner]:
    made = FakeRunner()
    yield made
    for worker in made.workers:
        worker.channel.close()


@pytest.fixture
def group(runner: FakeRunner, tmp_path: Path) -> Iterator[WorkerGroup]:
    made = WorkerGroup(
        tmp_path, tmp_path / "logs" / "0", "n1", runner, {"LANG": "C"}, DirectExecutor(), tmp_path / "kmsg"
    )
    yield made
    made.kill()


def test_each_worker_gets_its_rank_its_order_and_its_log(
    group: WorkerGroup, runner: FakeRunner, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        group.start(10.0, ORDERS, store, group.open_logs(2))
        first, second = runner.workers
        # Rank 0's worker serves the store: it inherits the listening socket and is told its number.
        start = ORDERS[0].to_json()
        assert first.channel.wait_message(1.0) == {**start, "store": {**start["store"], "fd": store.fileno()}}
        assert first.fds[1:-1] == [store.fileno()]
    assert second.channel.wait_message(1.0) == ORDERS[1].to_json()
    assert len(second.fds) == 2
    for local_rank, (rank, worker) in enumerate(zip((0, 5), runner.workers, strict=True)):
        assert tuple(worker.argv[:3]) == WORKER
        assert worker.argv[worker.argv.index("--fd") + 1] == str(worker.fds[0])
        assert worker.argv[worker.argv.index("--activity") + 1] == str(worker.fds[-1])
        assert worker.env == {"LANG": "C", "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        assert worker.log == tmp_path / "logs" / "0" / f"n1.{local_rank}.log"
        assert worker.log.parent.is_dir()


def test_what_the_workers_do_is_read_without_asking_them(group: WorkerGroup, runner: FakeRunner) -> None:
    group.start(10.0, ORDERS, None, group.open_logs(2))
    places = ["n1:cpu0", *["n0:cpu0"] * 4, "n1:cpu1"]
    assert group.doing(places) == ()
    activity = Activity()
    activity.share(runner.workers[1].fds[-1])
    activity.begin_step(7)
    with activity.doing("recv output of stage 0 mb 3 from rank 0", waits="dp"):
        (found,) = group.doing(places)
    assert (found.rank, found.place, found.step, found.waits) == (5, "n1:cpu1", 7, True)
    assert found.operation == "recv output of stage 0 micro-batch 3 from rank 0"


def test_news_come_once_and_in_order_with_the_end_last(group: WorkerGroup, runner: FakeRunner) -> None:
    group.start(10.0, ORDERS, None, group.open_logs(2))
    first, second = runner.workers
    assert group.news(11.0) == []
    assert group.view().last_progress == 10.0
    steps = [StepDone(step=number, loss=2.5) for number in (1, 2)]
    first.send(WorkerReady(step=0))
    for step in steps:
        second.send(step)
    assert group.news(12.0) == [WorkerUpdate(0, WorkerReady(step=0)), *(WorkerUpdate(5, step) for step in steps)]
    assert group.view().last_progress == 12.0
    second.send(ResidualsDropped(reason="another layout"))
    second.ends(0)
    last = ResidualsDropped(reason="another layout")
    assert group.news(13.0) == [WorkerUpdate(5, last), WorkerUpdate(5, exit_code=0)]
    assert group.news(14.0) == []
    assert group.view().last_progress == 13.0
    assert (group.view().running, group.view().exit_code) == (1, None)
    assert len(group.channels()) == 1


def test_a_worker_may_compile_before_its_first_step_and_when_it_says_so(group: WorkerGroup, runner: FakeRunner) -> None:
    group.start(10.0, ORDERS, None, group.open_logs(2))
    first, second = runner.workers
    found = [group.view().compiling]
    ready, step = WorkerReady(step=0), StepDone(step=1, loss=2.5)
    for worker, report in ((first, ready), (first, step), (second, step), (first, Compiling()), (first, step)):
        worker.send(report)
        group.news(11.0)
        found.append(group.view().compiling)
    assert found == [True, True, True, False, True, False]


def test_the_channels_wake_whoever_waits_for_news(group: WorkerGroup, runner: FakeRunner) -> None:
    group.start(10.0, ORDERS, None, group.open_logs(2))
    channels = group.channels()
    assert [channel.fileno() >= 0 for channel in channels] == [True, True]
    runner.workers[1].send(WorkerReady(step=0))
    assert channels[1].wait_message(1.0) == {"kind": "ready", "step": 0}
    assert channels[0].wait_message(0.0) is None


@pytest.mark.parametrize(
    ("codes", "first"),
    [
        ((0, 0), 0),
        ((75, 75), 75),
        ((0, 75), 75),
        ((76, None), 76),
        ((76, 76), 76),
        ((76, -9), -9),
        ((-9, 76), -9),
        ((76, 1), 1),
        ((0, 76), 76),
        ((0, None), None),
        ((None, None), None),
    ],
)
def test_the_end_that_explains_most_comes_first(
    group: WorkerGroup, runner: FakeRunner, codes: tuple[int | None, ...], first: int | None
) -> None:
    group.start(10.0, ORDERS, None, group.open_logs(2))
    for worker, code in zip(runner.workers, codes, strict=True):
        if code is not None:
            worker.ends(code)
    group.news(11.0)
    assert group.view().exit_code == first
    assert group.view().running == codes.count(None)


def test_the_error_a_worker_told_before_its_end_is_kept(group: WorkerGroup, runner: FakeRunner) -> None:
    group.start(10.0, ORDERS, None, group.open_logs(2))
    runner.workers[0].ends(76)
    runner.workers[1].send(error("rank 5 in step 3: CUDA error: …", fault="illegal_access"))
    runner.workers[1].ends(1)
    news = group.news(11.0)
    failure = group.view().failure
    assert failure is not None
    assert (group.view().exit_code, group.view().error) == (1, failure.sentence)
    assert (failure.rank, failure.sentence) == (5, "rank 5 in step 3: CUDA error: …")
    assert failure.fault.blame == "user"
    details = {"kind": "RuntimeError", "message": "CUDA error: …", "step": 3, "operation": "step 3"}
    assert failure.details == details
    assert news[-1].failure == failure


def test_an_error_of_an_unknown_fault_is_an_exception(group: WorkerGroup, runner: FakeRunner) -> None:
    group.start(10.0, ORDERS, None, group.open_logs(2))
    runner.workers[0].send(error("gone", fault="no such row"))
    runner.workers[0].ends(1)
    group.news(11.0)
    failure = group.view().failure
    assert failure is not None
    assert (failure.sentence, failure.fault.name) == ("gone", "exception")


@pytest.mark.parametrize(
    "line", [b'{"kind": "step"}', b'{"kind": "error", "sentence": "gone"}', b'{"type": "ready", "step": 0}', b"step 3"]
)
def test_a_worker_whose_report_cannot_be_read_is_ended(group: WorkerGroup, runner: FakeRunner, line: bytes) -> None:
    group.start(10.0, ORDERS, None, group.open_logs(2))
    worker = runner.workers[1]
    worker.send(WorkerReady(step=0))
    worker.channel.sock.sendall(line + b"\n")
    assert group.news(11.0) == [WorkerUpdate(5, WorkerReady(step=0))]
    assert worker.killed
    assert group.view().leaving
    # Its channel is closed now, so it may end by itself as a worker that was asked to stop.
    worker.ends(75)
    (update,) = group.news(12.0)
    view = group.view()
    assert (view.exit_code, view.running) == (-9, 1)
    assert (view.error or "").startswith("rank 5: its agent cannot read its messages: it sent a")
    event = event_of("n1", update)
    assert event is not None
    assert event[0] == "worker_died"
    assert event[2]["fault"] == "exception"


KMSG = (
    "6,101,9000000,-;NVRM: Xid (PCI:0000:3b:00): 48, pid=77, name=python3, DBE (double bit error)\n"
    "4,102,10500000,-;NVRM: Xid (PCI:0000:3b:00): 13, pid=78, Graphics Exception: ESR 0x505648=0x0\n"
    " SUBSYSTEM=pci\n"
    "3,103,11000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=78, name=python3, GPU has fallen off the bus.\n"
)
"""Records as /dev/kmsg gives them: the first is older than the workers, the second says nothing against the node."""


@pytest.mark.parametrize("code", [-6, -9, 1, 76])
def test_the_kernel_tells_of_hardware_that_failed(
    group: WorkerGroup, runner: FakeRunner, tmp_path: Path, code: int
) -> None:
    (tmp_path / "kmsg").write_text(KMSG)
    group.start(10.0, ORDERS, None, group.open_logs(2))
    if code > 0:
        runner.workers[0].send(error("rank 0: CUDA error"))
    runner.workers[0].ends(code)
    news = group.news(12.0)
    failure = news[-1].failure
    assert failure is not None
    assert failure.fault.name == "gpu_lost"
    assert failure.sentence.startswith("rank 0: CUDA error; " if code > 0 else "rank 0: a GPU has fallen off the bus")
    assert "Xid (PCI:0000:3b:00): 79" in failure.sentence
    assert news[-1].death("n1")[1]["fault"] == "gpu_lost"


def test_what_the_kernel_told_long_ago_ended_nobody_now(group: WorkerGroup, runner: FakeRunner, tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_text(KMSG)
    group.start(10.0, ORDERS, None, group.open_logs(2))
    runner.workers[0].ends(-9)
    assert group.news(1000.0)[-1].failure is None


def test_a_worker_that_ends_well_asks_nobody(group: WorkerGroup, runner: FakeRunner, tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_text(KMSG)
    group.start(10.0, ORDERS, None, group.open_logs(2))
    runner.workers[0].ends(0)
    runner.workers[1].ends(75)
    assert [news.failure for news in group.news(12.0)] == [None, None]


def test_an_abort_is_explained_by_the_end_of_its_own_log(
    group: WorkerGroup, runner: FakeRunner, tmp_path: Path
) -> None:
    log = tmp_path / "logs" / "0" / "n1.0.log"
    log.parent.mkdir(parents=True)
    text = (
        "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 PG GUID 0 Rank 0] "
        "Process group watchdog thread terminated with exception: CUDA error: {}\n"
    )
    log.write_text(text.format("uncorrectable ECC error encountered"))
    group.start(10.0, ORDERS, None, group.open_logs(2))
    runner.workers[0].ends(-6)
    # What an earlier worker left says nothing of this one.
    assert group.news(11.0)[-1].failure is None
    (log.parent / "n1.1.log").write_text(text.format("an illegal memory access was encountered"))
    runner.workers[1].ends(-6)
    failure = group.news(12.0)[-1].failure
    assert failure is not None
    assert failure.fault.name == "illegal_access"
    assert "watchdog thread terminated with exception: CUDA error: an illegal" in failure.sentence


def test_a_worker_that_told_an_error_of_its_own_is_about_to_end(group: WorkerGroup, runner: FakeRunner) -> None:
    group.start(10.0, ORDERS, None, group.open_logs(2))
    runner.workers[0].send(error("rank 0 in step 3: connection closed by peer", "lost"))
    group.news(11.0)
    assert not group.view().leaving
    runner.workers[1].send(error("ValueError: no"))
    runner.workers[0].ends(76)
    group.news(12.0)
    assert group.view().leaving
    runner.workers[1].ends(1)
    group.news(13.0)
    assert (group.view().leaving, group.view().exit_code, group.view().error) == (False, 1, "ValueError: no")


def test_orders_reach_those_who_live_and_the_dead_are_no_hindrance(group: WorkerGroup, runner: FakeRunner) -> None:
    group.start(10.0, ORDERS, None, group.open_logs(2))
    first, second = runner.workers
    assert second.channel.wait_message(1.0) == ORDERS[1].to_json()
    first.ends(-9)
    group.order(StopOrder())
    assert second.channel.wait_message(1.0) == {"kind": "stop"}
    assert WorkerUpdate(0, exit_code=-9) in group.news(11.0)


def test_workers_that_stop_for_another_plan_are_no_deaths(group: WorkerGroup, runner: FakeRunner) -> None:
    group.start(10.0, ORDERS, None, group.open_logs(2))
    first, second = runner.workers
    assert second.channel.wait_message(1.0) == ORDERS[1].to_json()
    group.order(ChangePlanOrder(save=True))
    assert second.channel.wait_message(1.0) == {"kind": "change_plan", "save": True}
    second.ends(EXIT_NEW_PLAN)
    first.ends(EXIT_INFRASTRUCTURE)  # it lost the other one while it ended
    updates = group.news(11.0)
    assert [event_of("a", update) for update in updates if update.exit_code is not None] == [None, None]
    assert group.view().exit_code == EXIT_NEW_PLAN


def test_after_a_kill_there_is_nobody(group: WorkerGroup, runner: FakeRunner) -> None:
    group.start(10.0, ORDERS, None, group.open_logs(2))
    first, second = runner.workers
    first.ends(0)
    group.news(11.0)
    group.kill()
    assert (first.killed, second.killed) == (False, True)
    assert second.waited
    assert group.workers == []
    assert group.channels() == []
    assert group.news(12.0) == []
    assert (group.view().running, group.view().exit_code) == (0, None)
    # The channel is closed too: a worker that survived, however, would end by itself.
    assert second.channel.wait_message(0.0) is None
    group.kill()


def test_killed_workers_that_stay_in_the_system_are_waited_for_together_and_not_forgotten(
    group: WorkerGroup, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(FakeWorker, "wait", lambda _, timeout_s: waits.append(timeout_s))
    monkeypatch.setattr("hpctrain.agent.group.time.monotonic", lambda: sum(waits))
    group.start(10.0, ORDERS, None, group.open_logs(2))
    for worker in runner.workers:
        assert not group.kill()
        worker.ends(-9)
    assert group.kill()
    assert waits == [KILL_WAIT_S, 0.0]


def test_a_group_starts_again_in_the_next_generation(group: WorkerGroup, runner: FakeRunner) -> None:
    group.start(10.0, ORDERS, None, group.open_logs(2))
    runner.workers[0].send(error("old"))
    group.news(11.0)
    group.kill()
    group.start(20.0, [ORDERS[1].model_copy(update={"rank": 3})], None, group.open_logs(1))
    assert [worker.env["RANK"] for worker in runner.workers] == ["0", "5", "3"]
    view = group.view()
    assert (view.running, view.exit_code, view.last_progress, view.error) == (1, None, 20.0, None)
