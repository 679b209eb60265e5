"""`hpctrain bench adapt --lab`: how soon a run gets another plan when a node or a link of a lab becomes slower or
recovers, how often it changes its plan without need, and how soon it reaches a loss with each `adapt.mode`.

All nodes of the lab start with the same share of a core. The kernel gives a node its share in each fiftieth of a second
(cgroups), so a node whose share is halved is half as fast.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from hpctrain.base.errors import CommandError
from hpctrain.base.process import end_process
from hpctrain.bench.adapt.adapting_job import GOAL, AdaptingJob, reached_s, usual_step_s
from hpctrain.bench.probe.lab_probe import probe_lab_nodes
from hpctrain.bench.record import RowStore, machine_and_versions
from hpctrain.bench.recovery.lab_jobs import LabSite, TrainingSettings
from hpctrain.lab.config_files import find_cpu_control
from hpctrain.lab.faults import heal, limit_cpu, shape
from hpctrain.lab.layout import LabLayout
from hpctrain.lab.machine import Machine
from hpctrain.lab.spec import LabSpec
from hpctrain.lab.status import node_states
from hpctrain.launch.small_run import BYTES_VOCABULARY
from hpctrain.planner.replan.replan import TopologyChanges
from hpctrain.records.history.run_log import MetricRow
from hpctrain.records.model.decoder_spec import DecoderSpec
from hpctrain.records.run.adapt import Adapt, AdaptMode
from hpctrain.records.run.run import AutoParallel, FixedParallel

Case = Literal["node", "link", "quiet", "noisy", "flapping", "ablation"]
MODES: tuple[AdaptMode, ...] = ("off", "once", "online")
NODES = 4
SHARE = 0.4
"""Cores of each node at the beginning. All together leave some time of two cores to Slurm and to the bench."""
RATE = "1gbit"
SLOW_RATE = "100mbit"
LAB = LabSpec(nodes=[{"name": f"node{number}"} for number in range(NODES)], rate=RATE, cpu_share=SHARE)
TRAINING = TrainingSettings(
    DecoderSpec(layers=4, dim=96, heads=4, vocab=BYTES_VOCABULARY), rows=48, seq_len=64, lr=1e-3
)
REPLICAS = FixedParallel(mode="fixed", dp=NODES, micro_batch=1)
"""Parallelism of all cases but `link`: each node keeps some micro-batches, so that its speed is measured all the time.
In the case `link`, the planner chooses, and may leave a node out."""
POLL_S = 0.2
START_S = 180.0
"""Seconds within which a job must make its first steps."""
STEP_S = 5.0
"""Seconds that a step may take, as a mean; a run that needs more counts as hung."""
IDLE_S = 60.0
LOSS_STEPS = 20
"""Steps whose mean loss is compared with the target."""


@dataclass(frozen=True)
class AdaptSettings:
    """Settings of the bench."""

    cases: tuple[Case, ...]
    steps: int = 1000
    """Steps of the cases quiet, noisy and flapping."""
    after: int = 64
    """`adapt.after` of the runs."""
    at: int = 200
    """Step after which a node or a link becomes slower."""
    limit_s: float = 120.0
    """Seconds after a change within which the run must have reached its goal."""
    flap_steps: int = 60
    """Steps for which a flapping node is slow, and then for which it is as fast as before."""
    seeds: int = 5
    """Runs of each mode in the ablation, with seeds from 0."""
    target_loss: float = 2.6
    """Mean loss of `LOSS_STEPS` steps, in nats, at which a run of the ablation ends."""


@dataclass
class AdaptRow:
    """What one run did after a change, or in all its steps."""

    case: str
    what: str
    """What happened to the lab."""
    mode: AdaptMode = "online"
    seed: int = 0
    steps: int = 0
    """Steps of the run until the end of the case."""
    before_s: float | None = None
    """Median seconds of a step before the change."""
    predicted_s: float | None = None
    """Seconds of a step that the planner predicts for the best plan after the change: `before_s` times its predicted
    ratio."""
    after_s: float | None = None
    """Median seconds of a step after the goal was reached, or of the last steps."""
    reached_s: float | None = None
    """Seconds from the change until the run had `GOAL` of the predicted throughput; None if it never had."""
    target_s: float | None = None
    """Seconds from the first step to the target loss."""
    adapted: list[str] = field(default_factory=list)
    """The changes of the plan: step before each, whether it corrects the probe's figures, and its reason."""
    taken_back: int = 0
    """How many of these changes took the previous plan back."""


def measure(
    machine: Machine, layout: LabLayout, settings: AdaptSettings, folder: Path, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Measure what the file of rows in `folder` does not have yet, on a lab of the spec `LAB`; return the record of the
    bench. No job outlives this call.

    Args:
        progress: called with what is being measured.

    Raises:
        HpctrainError: a job made no steps, or a command failed.
        StorageError: a row cannot be written.
    """
    described = asdict(settings)
    store = RowStore(folder / "rows.jsonl", {key: value for key, value in described.items() if key != "cases"})
    site = LabSite(machine, layout, tuple(layout.names), folder, TRAINING, "bench adapt")
    topology = folder / "topology.json"
    if not topology.exists():
        progress("the lab's nodes and links")
        probe_lab_nodes(machine, layout, layout.names, "cpu")[0].write(topology)
    bench = _Bench(site, settings, topology, store, progress)
    for case in settings.cases:
        bench.measure(case)
    rows = [row for row in store.rows if row["case"] in settings.cases]
    lab = {"nodes": NODES, "cpu_share": SHARE, "rate": RATE, "slow_rate": SLOW_RATE}
    return machine_and_versions("adapt", described | {"lab": lab}) | {"rows": rows}


class _Bench:
    """Runs the jobs of the cases, one after the other."""

    def __init__(
        self, site: LabSite, settings: AdaptSettings, topology: Path, store: RowStore, progress: Callable[[str], None]
    ) -> None:
        self._site, self._settings, self._topology, self._store = site, settings, topology, store
        self._progress = progress
        self._jobs = len(list(site.folder.glob("job*")))

    def measure(self, case: Case) -> None:
        """Make the rows of a case that are missing."""
        if case != "ablation":
            if self._store.find(case=case) is None:
                self._progress(case)
                with self._job(AutoParallel() if case == "link" else REPLICAS) as job:
                    for row in getattr(self, f"_{case}")(job):
                        self._add(row)
            return
        for seed in range(self._settings.seeds):
            for mode in MODES:
                if self._store.find(case=case, mode=mode, seed=seed) is None:
                    self._progress(f"{case}, {mode}, seed {seed}")
                    with self._job(REPLICAS, mode, seed) as job:
                        self._add(self._until_target(job, mode, seed))

    def _add(self, row: AdaptRow) -> None:
        self._store.add({key: value for key, value in asdict(row).items() if value is not None})

    def _node(self, job: AdaptingJob) -> Iterator[AdaptRow]:
        """Halve the share of a node; when the run has taken another plan, give the share back."""
        victim = self._site.nodes[2]
        self._wait(job, self._settings.at)
        slower = TopologyChanges(slow={victim: 0.5})
        ratio = job.predicted_ratio(slower)
        before_s = usual_step_s(job.rows()[-100:])
        yield self._change(
            job, AdaptRow("node", f"{victim} gets half of its share"), lambda: self._limit(victim, SHARE / 2),
            before_s, ratio * before_s,
        )  # fmt: skip
        self._wait(job, job.rows()[-1].step + 2 * self._settings.at)
        yield self._change(
            job, AdaptRow("node", f"{victim} gets its share back"), lambda: self._limit(victim, SHARE),
            usual_step_s(job.rows()[-100:]), before_s,
        )  # fmt: skip

    def _link(self, job: AdaptingJob) -> Iterator[AdaptRow]:
        """Shape the link of a node to a tenth."""
        site, victim = self._site, self._site.nodes[2]
        self._wait(job, self._settings.at)
        pairs = {(min(victim, name), max(victim, name)): 0.1 for name in site.nodes if name != victim}
        ratio, before_s = job.predicted_ratio(TopologyChanges(links=pairs)), usual_step_s(job.rows()[-100:])
        yield self._change(
            job, AdaptRow("link", f"the link of {victim} has a tenth of its rate"),
            lambda: shape(site.machine, site.layout, [victim], SLOW_RATE), before_s, ratio * before_s,
        )  # fmt: skip

    def _change(
        self, job: AdaptingJob, row: AdaptRow, change: Callable[[], None], before_s: float, predicted_s: float
    ) -> AdaptRow:
        """Change the lab, wait until the run has reached its goal or the limit is over, and return the row.

        Args:
            before_s: seconds of a step before the change.
            predicted_s: seconds of a step that are predicted for the best plan after the change.
        """
        clock, changes = self._site.machine.clock, len(job.events("adapted"))
        since_s = clock.wall()
        change()
        reached = None
        while reached is None and clock.wall() - since_s < self._settings.limit_s:
            clock.sleep(POLL_S)
            if len(job.events("adapted")) > changes:
                reached = reached_s(job.rows(), since_s, predicted_s / GOAL)
        self._wait(job, job.rows()[-1].step + 50)
        row.before_s, row.predicted_s, row.reached_s = before_s, predicted_s, reached
        row.after_s = usual_step_s(job.rows()[-50:])
        return _with_events(row, job, changes)

    def _quiet(self, job: AdaptingJob) -> Iterator[AdaptRow]:
        """Change nothing."""
        self._wait(job, self._settings.steps)
        yield _with_events(AdaptRow("quiet", "nothing", after_s=usual_step_s(job.rows())), job)

    def _noisy(self, job: AdaptingJob) -> Iterator[AdaptRow]:
        """Start processes that compute for a while on random nodes, within the nodes' shares."""
        over, chance = threading.Event(), random.Random(0)

        def disturb() -> None:
            while not over.wait(chance.uniform(0.5, 5.0)):
                self._compute(chance.choice(self._site.nodes), chance.uniform(0.1, 2.0), over)

        noise = threading.Thread(target=disturb, name="noise")
        self._wait(job, 1)
        noise.start()
        try:
            self._wait(job, self._settings.steps)
        finally:
            over.set()
            noise.join()
        row = AdaptRow("noisy", "bursts of other work of 0.1 to 2 s on random nodes, each 0.5 to 5 s")
        row.after_s = usual_step_s(job.rows())
        yield _with_events(row, job)

    def _compute(self, node: str, seconds: float, over: threading.Event) -> None:
        """Compute in the cgroup of a node for `seconds`, or until `over` is set."""
        machine = self._site.machine
        control = find_cpu_control(machine.mounts.read_text())
        assert control is not None, "the lab has CPU shares"
        argv = ["sh", "-c", 'echo $$ >"$0" && while :; do :; done', str(control.join_file(node))]
        process = machine.runner.start(argv)
        over.wait(seconds)
        end_process(process)

    def _flapping(self, job: AdaptingJob) -> Iterator[AdaptRow]:
        """Halve the share of a node and give it back, in turns."""
        victim, every, step = self._site.nodes[1], self._settings.flap_steps, self._settings.after
        self._wait(job, step)
        slow = False
        while step < self._settings.steps:
            slow = not slow
            self._limit(victim, SHARE / 2 if slow else SHARE)
            step += every
            self._wait(job, min(step, self._settings.steps))
        row = AdaptRow("flapping", f"{victim} gets half of its share in every second {every} steps")
        row.after_s = usual_step_s(job.rows())
        yield _with_events(row, job)

    def _until_target(self, job: AdaptingJob, mode: AdaptMode, seed: int) -> AdaptRow:
        """Give a node 60 % of its share before the first comparison of plans, give another node half of its share at
        step `settings.at`, and train to the target loss."""
        first, second = self._site.nodes[1], self._site.nodes[3]
        self._wait(job, 1)
        self._limit(first, 0.6 * SHARE)
        self._wait(job, self._settings.at, lambda rows: target_s(rows, self._settings.target_loss) is not None)
        self._limit(second, 0.5 * SHARE)
        limit = 20 * self._settings.at
        self._wait(job, limit, lambda rows: target_s(rows, self._settings.target_loss) is not None)
        row = AdaptRow("ablation", f"{first} has 60 % of its share, {second} half from step {self._settings.at}", mode)
        row.seed, row.target_s = seed, target_s(job.rows(), self._settings.target_loss)
        return _with_events(row, job)

    def _limit(self, node: str, cores: float) -> None:
        limit_cpu(self._site.machine, self._site.layout, [node], cores)

    @contextlib.contextmanager
    def _job(
        self, parallel: AutoParallel | FixedParallel, mode: AdaptMode = "online", seed: int = 0
    ) -> Iterator[AdaptingJob]:
        """Start a run for the `with` block; afterwards it has ended, and the lab is healthy and idle."""
        site = self._site
        adapt = Adapt(mode=mode, after=self._settings.after)
        job = AdaptingJob(site, self._jobs, self._topology, adapt=adapt, parallel=parallel, seed=seed)
        self._jobs += 1
        try:
            job.start()
            yield job
        finally:
            job.end()
            heal(site.machine, site.layout, site.nodes)

            def idle() -> bool:
                states = node_states(site.machine, site.layout)
                return all(states[name].flags == ("IDLE",) for name in site.nodes)

            if not site.machine.wait(idle, IDLE_S):
                raise CommandError(f"bench adapt: a job's nodes are not idle {IDLE_S:g} s after its end; see `squeue`")

    def _wait(self, job: AdaptingJob, step: int, until: Callable[[list[MetricRow]], bool] = lambda rows: False) -> None:
        """Wait until the job has done a step, or `until` is true of its rows.

        Raises:
            CommandError: it has not within a time that is enough for very slow steps.
        """
        clock = self._site.machine.clock
        rows = job.rows()
        deadline = clock.now() + START_S + STEP_S * (step - (rows[-1].step if rows else 0))
        while not (rows and (rows[-1].step >= step or until(rows))):
            if clock.now() > deadline:
                raise CommandError(
                    f"bench adapt: a job came to step {rows[-1].step if rows else 0}, not to {step}; see {job.folder}"
                )
            clock.sleep(POLL_S)
            rows = job.rows()


def target_s(rows: list[MetricRow], loss: float) -> float | None:
    """Return the seconds from the end of the first step until the mean loss of `LOSS_STEPS` steps is at most `loss`;
    None if it never is."""
    for end in range(LOSS_STEPS, len(rows) + 1):
        if fmean(row.loss for row in rows[end - LOSS_STEPS : end]) <= loss:
            return rows[end - 1].time_s - rows[0].time_s
    return None


def _with_events(row: AdaptRow, job: AdaptingJob, first: int = 0) -> AdaptRow:
    """Return the row with the changes of the plan.

    Args:
        first: number of the first change that counts.
    """
    rows, changes = job.rows(), job.events("adapted")[first:]
    row.steps = rows[-1].step
    for event in changes:
        step = max((row.step for row in rows if row.generation < event.generation), default=0)
        remark = ", corrects the probe" * event.data["corrects_probe"]
        row.adapted.append(f"after step {step}{remark}: {event.reason}")
    row.taken_back = sum(bool(event.data["taken_back"]) for event in changes)
    return row
