"""`hpctrain bench recovery --lab`: the time from a fault to the next step, and the steps that the fault cost, beside
torchrun's elastic restart and a plain job that Slurm requeues.

All systems train the same model on the same nodes of a lab and save as often. They take turns: each gets a job, trains,
has a fault at a random moment and goes on. A job gets one fault that costs a node, or a few faults of workers.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.base.errors import CommandError, InputError
from hpctrain.bench.comparison import ComparisonRow, TimeSample, compare
from hpctrain.bench.record import RowStore, machine_and_versions
from hpctrain.bench.recovery.lab_faults import (
    FaultSample,
    RecoveryRow,
    as_json,
    cost_of,
    inject,
    loss_difference,
    row_of,
    usual_step_s,
    victim_of,
)
from hpctrain.bench.recovery.lab_jobs import (
    BYTES_PER_PARAMETER,
    HpctrainJob,
    LabSite,
    RequeuedJob,
    TorchrunJob,
    TrainedStep,
    TrainingJob,
    TrainingSettings,
)
from hpctrain.lab.faults import heal, shape
from hpctrain.lab.layout import LabLayout
from hpctrain.lab.machine import Machine
from hpctrain.lab.status import node_states

MakeJob = Callable[[LabSite, int], TrainingJob]
OWN = "hpctrain"
SYSTEMS: dict[str, MakeJob] = {
    OWN: lambda site, number: HpctrainJob(site, number, {"memory": "auto"}),
    "hpctrain-memory-off": lambda site, number: HpctrainJob(site, number, {"memory": "off"}),
    "torchrun": TorchrunJob,
    "requeue": RequeuedJob,
}
"""Name of a system -> function that makes a job of it. Names of systems of hpctrain begin with 'hpctrain'."""
POLL_S = 0.1
START_S = 180.0
"""Seconds within which a job must make its first steps."""
IDLE_S = 60.0
BETWEEN = 3
"""Steps between the end of a recovery and the next fault, at least."""


@dataclass(frozen=True)
class RecoverySettings:
    """Settings of the bench: cases, systems, numbers of faults, and what is trained."""

    cases: tuple[str, ...]
    systems: tuple[str, ...]
    training: TrainingSettings
    repeats: int = 10
    """Faults of each case for systems of hpctrain."""
    others: int = 3
    """Faults of each case for the other systems."""
    nodes: int = 4
    limit_s: float = 120.0
    """Seconds after a fault within which the job must have caught up."""
    worker_faults: int = 3
    """Most faults of workers in one job."""
    reference_steps: int = 60
    """Steps of the run without faults, with whose losses those after faults are compared; 0: no such run."""

    def count(self, system: str) -> int:
        """Return the number of faults of each case for a system."""
        return self.repeats if system.startswith(OWN) else self.others


def measure(
    machine: Machine, layout: LabLayout, settings: RecoverySettings, folder: Path, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Measure what the file of samples in `folder` does not have yet, and return the record of the bench. The links are
    not shaped meanwhile. No job and no fault outlives this call.

    Args:
        progress: called with a line before each job and after each fault.

    Raises:
        InputError: the lab has too few nodes or is in use, or the samples in `folder` were made with other settings.
        RefusedError: the lab's controller does not answer.
        CommandError: a job made no steps, or a command failed.
        StorageError: a sample cannot be written.
    """
    layout.require_nodes(settings.nodes, "bench recovery --nodes")
    site = LabSite(machine, layout, tuple(layout.names[: settings.nodes]), folder, settings.training)
    busy = sorted(name for name, state in node_states(machine, layout).items() if state.flags[:1] != ("IDLE",))
    if busy:
        raise InputError(f"bench recovery: {', '.join(busy)} are not idle; see `hpctrain lab status`")
    described = {**asdict(settings), "training": training_as_json(settings.training)}
    store = RowStore(folder / "samples.jsonl", {key: described[key] for key in ("training", "nodes")})
    bench = _LabBench(site, settings, store, progress)
    try:
        shape(machine, layout, site.nodes, None)
        bench.run()
    finally:
        heal(machine, layout, site.nodes)  # also restores the rates of the links
    return machine_and_versions("recovery", described) | summary(store.rows, settings)


def training_as_json(training: TrainingSettings) -> dict[str, Any]:
    """Return the settings of the training as JSON values, with the bytes of the state of a rank."""
    spec = training.spec
    return asdict(training) | {
        "spec": spec.model_dump(exclude_none=True), "state_bytes": BYTES_PER_PARAMETER * spec.parameters(),
    }  # fmt: skip


def summary(lines: Sequence[dict[str, Any]], settings: RecoverySettings) -> dict[str, Any]:
    """Return the rows of the record, and the ratios of hpctrain's times to those of the other systems, over the pairs
    of faults with the same number.

    Args:
        lines: the samples as JSON objects; a line with the losses of the run without faults is left out.
    """
    samples = [FaultSample(**line) for line in lines if "losses" not in line]
    rows: list[RecoveryRow] = []
    ratios: list[ComparisonRow] = []
    for case in settings.cases:
        by_system = {
            system: [sample for sample in samples if (sample.case, sample.system) == (case, system)]
            for system in settings.systems
        }
        rows += [row_of(group) for group in by_system.values() if group]
        ours = {sample.number: sample.seconds for sample in by_system.get(OWN, [])}
        for system, group in by_system.items():
            pairs = [
                (TimeSample(own_s, 0.0), TimeSample(sample.seconds, 0.0))
                for sample in group
                if system != OWN and (own_s := ours.get(sample.number)) is not None and sample.seconds is not None
            ]
            if pairs:
                ratios.append(compare(case, system, pairs, cpu=False))
    return {
        "rows": [{key: value for key, value in asdict(row).items() if value is not None} for row in rows],
        "ratios": [{key: value for key, value in asdict(row).items() if value is not None} for row in ratios],
    }


class _LabBench:
    """Runs the jobs, one after the other."""

    def __init__(
        self, site: LabSite, settings: RecoverySettings, store: RowStore, progress: Callable[[str], None]
    ) -> None:
        self._site = site
        self._settings = settings
        self._store = store
        self._progress = progress
        self._jobs = len(list(site.folder.glob("job*")))

    def run(self) -> None:
        """Make all samples that are missing; the systems take turns."""
        settings = self._settings
        undisturbed = self._losses()
        for case in settings.cases:
            size = settings.worker_faults if case == "worker_killed" else 1
            for first in range(0, max(map(settings.count, settings.systems)), size):
                for system in settings.systems:
                    numbers = [
                        number
                        for number in range(first, min(first + size, settings.count(system)))
                        if self._store.find(case=case, system=system, number=number) is None
                    ]
                    if numbers:
                        self._job_with_faults(case, system, numbers, undisturbed)

    def _losses(self) -> dict[int, float]:
        """Return step -> loss of hpctrain's run without faults; {} without such a run."""
        count = self._settings.reference_steps
        if not count or OWN not in self._settings.systems:
            return {}
        row = self._store.find(reference=True)
        if row is None:
            self._progress(f"{OWN}, {count} steps without a fault")
            with self._job(OWN) as job:
                self._wait(job, lambda steps: steps[-1].step >= count, START_S + 10 * count)
                row = {"reference": True, "losses": [step.loss for step in job.steps()]}
            self._store.add(row)
        return dict(enumerate(row["losses"], 1))

    def _job_with_faults(self, case: str, system: str, numbers: Sequence[int], undisturbed: dict[int, float]) -> None:
        with self._job(system) as job:
            for number in numbers:
                sample = self._fault(job, case, system, number)
                if sample.seconds is not None and system.startswith(OWN):
                    difference = loss_difference(job.steps(), undisturbed)
                    sample = replace(sample, loss_difference=difference)
                self._store.add(as_json(sample))
                took = f"{sample.seconds:.2f} s" if sample.seconds is not None else f"not recovered: {sample.reason}"
                self._progress(f"{case}, {system}, fault {number + 1} on {sample.node}: {took}")
                if sample.seconds is None:
                    break

    def _fault(self, job: TrainingJob, case: str, system: str, number: int) -> FaultSample:
        """Cause a fault at a random moment, the same for all systems, wait until the job has caught up, and return what
        the fault cost."""
        site, settings, clock = self._site, self._settings, self._site.machine.clock
        chance = random.Random(f"{case} {number}")
        begin = (job.steps() or [TrainedStep(0, 0, 0.0, 0.0, 0.0)])[-1].step
        more = max(BETWEEN, settings.training.save_every) + chance.randint(1, settings.training.save_every)
        self._wait(job, lambda steps: steps[-1].step >= begin + more, START_S)
        step_s, node = usual_step_s(job.steps()), victim_of(case, number, site.nodes)
        clock.sleep(step_s * chance.random())
        before = job.steps()
        fault_s = inject(site, job, case, node)
        sample = FaultSample(case, system, number, node, step_s)
        while (known := cost_of(sample, fault_s, before, job.steps())) is None:
            reason = job.why_over()
            if clock.wall() - fault_s > settings.limit_s:
                reason = f"no new step within {settings.limit_s:g} s"
            if reason is not None:
                return replace(sample, reason=reason)
            clock.sleep(POLL_S)
        return known

    @contextlib.contextmanager
    def _job(self, system: str) -> Iterator[TrainingJob]:
        """Start a job for the `with` block; afterwards it has ended, and the lab is healthy and idle."""
        site = self._site
        job = SYSTEMS[system](site, self._jobs)
        self._jobs += 1
        try:
            job.start()
            yield job
        finally:
            job.end()
            heal(site.machine, site.layout, site.nodes)
            shape(site.machine, site.layout, site.nodes, None)
            self._wait_until_idle()

    def _wait_until_idle(self) -> None:
        site = self._site

        def idle() -> bool:
            states = node_states(site.machine, site.layout)
            return all(states[name].flags == ("IDLE",) for name in site.nodes)

        if not site.machine.wait(idle, IDLE_S):
            raise CommandError(f"bench recovery: a job's nodes are not idle {IDLE_S:g} s after its end; see `squeue`")

    def _wait(self, job: TrainingJob, until: Callable[[list[TrainedStep]], bool], limit_s: float) -> None:
        """Wait until `until` is true of the job's steps.

        Raises:
            CommandError: the job has ended, or `until` is not true within `limit_s` seconds.
        """
        deadline = self._site.machine.clock.now() + limit_s
        while not ((steps := job.steps()) and until(steps)):
            reason = job.why_over()
            if reason is not None or self._site.machine.clock.now() > deadline:
                where = f"step {steps[-1].step}" if steps else "no step"
                why = reason or f"{limit_s:g} s are over"
                raise CommandError(f"bench recovery: a job came to {where} only: {why}; see {job.folder}")
            self._site.machine.clock.sleep(POLL_S)
