"""Makes the record of the next generation: its members, the plan that they run, and the checkpoint from which they
start."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.agent.decide import FOR_NEW_PLAN
from hpctrain.agent.event_log import EventLog
from hpctrain.agent.generation_store import Proposal, ProposedGeneration
from hpctrain.base.errors import HpctrainError, InputError, NoProgressError, RefusedError
from hpctrain.checkpoint import published
from hpctrain.checkpoint.memory.choose import choose_restore
from hpctrain.launch.preflight.checks import check_devices, check_plan
from hpctrain.node.attempt_times import AttemptTimes
from hpctrain.node.environment import describe_changes
from hpctrain.planner import make_plan
from hpctrain.planner.adapt.decision import fitted_profile
from hpctrain.planner.replan.calibration import learned_profile
from hpctrain.planner.replan.replan import apply_changes, replan, with_fewer_spares
from hpctrain.records.history.adapted_plan import AdaptedPlan, adapted_plan_file
from hpctrain.records.history.generation import GENERATIONS, Generation, StoreAddress, new_plan_name, record_file
from hpctrain.records.history.ledger import is_new_checkpoint, retries_spent_text
from hpctrain.records.history.memory_state import MemorySource
from hpctrain.records.history.run_log import EventKind, read_events
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.profile import CalibrationProfile
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Topology
from hpctrain.runs.folder import newest_plan
from hpctrain.runs.lost_checkpoints import CHECKPOINTS, lost_checkpoints_error, saved_step
from hpctrain.schedule.resolve import schedule_of


@dataclass
class _PendingEvents:
    """Events and plan files that are written once the agents have agreed on the record of a generation. For a record
    that loses against another proposal nothing is written."""

    events: list[tuple[EventKind, str, dict[str, Any]]] = field(default_factory=list)
    """(kind, reason, data) of each event."""
    files: dict[str, Plan] = field(default_factory=dict)
    """Name of a file in the run folder -> the plan to write to it."""


@dataclass(frozen=True)
class GenerationMaker:
    """Makes the record of a generation that an agent proposes."""

    folder: Path
    run: Run
    nodes: tuple[str, ...]
    """Nodes that the attempt began with."""
    event_log: EventLog

    def make(self, proposal: Proposal) -> ProposedGeneration:
        """Return the record of the next generation with its plan, and two functions that are called once the agents
        have agreed on the record. The first writes the events; the second, if the plan is new, the copy of the plan
        that users may edit for the next attempt: `plan.json` or `plan-<generation>.json` in the run folder.

        Raises:
            RefusedError: the model does not fit on the members' nodes, the plan in the run folder is for other devices,
                or all saved checkpoints are lost.
            NoProgressError: more than `recovery.retries` generations in a row have failed without progress.
            InputError: a file of the run has errors or is untrusted, or the topology or the plan cannot be
                used.
            StorageError: the plan cannot be written.
            OSError: the folder `generations` or `checkpoints` cannot be made or read.
        """
        pending = _PendingEvents()
        if proposal.previous is None or proposal.previous.attempt != proposal.attempt:
            # All members have recorded their software before they joined.
            changes = describe_changes(self.folder, proposal.attempt)
            pending.events += [("environment_changed", *changes)] if changes else []
        adapted = self._adapted(proposal)
        plan = self._plan(proposal, pending) if adapted is None else self._take(adapted, proposal.number, pending)
        # The copy that runs is never written again; the public one may be edited for the next attempt.
        name = new_plan_name(proposal.number)
        (self.folder / GENERATIONS).mkdir(exist_ok=True)
        plan.write(self.folder / name)
        first = plan.ranks[0].node
        checkpoints = self._list_checkpoints()
        newest = _relative(checkpoints[-1]) if checkpoints else None
        source = self._memory(proposal, plan, newest)
        failures, newest_start = self._progress(proposal, source, newest, adapted is not None)
        restore = newest if source is not None else self._checkpoint(proposal, checkpoints, pending)
        started = source.step if source is not None else _step_of(restore)
        host = next(member for member in proposal.members if member.node == first)
        record = Generation(
            number=proposal.number,
            attempt=proposal.attempt,
            members=list(proposal.members),
            plan=name,
            store=StoreAddress(addr=host.addr, port=host.store_port, node=first),
            restore=restore,
            memory=source,
            first_weights=self.run.first_weights,
            reason=adapted.reason if adapted else proposal.reason,
            proposer=proposal.proposer,
            failures=failures,
            newest_start=max(newest_start, started),
        )
        return ProposedGeneration(
            record, plan, lambda: self._announce(proposal.number, pending), lambda: self._save_plan(pending)
        )

    def _adapted(self, proposal: Proposal) -> AdaptedPlan | None:
        """Return which plan replaces that of the last generation because of measured times; None if the generation
        ended in another way, a node of that plan is gone, or its files cannot be used."""
        previous = proposal.previous
        if previous is None or previous.attempt != proposal.attempt or proposal.reason != FOR_NEW_PLAN:
            return None
        nodes = {member.node for member in proposal.members}
        with contextlib.suppress(InputError, OSError):  # the old plan fits, too
            adapted = AdaptedPlan.read(adapted_plan_file(self.folder / GENERATIONS, previous.number), owned=True)
            return adapted if nodes.issuperset(Plan.read(self.folder / adapted.plan, owned=True).nodes) else None
        return None

    def _take(self, adapted: AdaptedPlan, number: int, pending: _PendingEvents) -> Plan:
        """Return the plan that was chosen because of measured times.

        Args:
            number: number of the generation that runs it.
            pending: gets the event about the plan, and its copy for the run folder.
        """
        plan, public = Plan.read(self.folder / adapted.plan, owned=True), f"plan-{number}.json"
        pending.files[public] = plan
        data = adapted.model_dump(exclude={"schema_", "generation", "plan", "reason"})
        data = {"plan": public, **plan.dims._asdict(), **data, "moves": len(plan.moves)}
        pending.events.append(("adapted", adapted.reason, data))
        return plan

    def _progress(
        self, proposal: Proposal, source: MemorySource | None, newest: str | None, planned: bool
    ) -> tuple[int, int]:
        """Return how many generations of the attempt in a row have failed, and the newest step from which one of them
        started. A generation that left a new checkpoint, or a later step in memory, counts as the first failure. One
        whose checkpoint was damaged counts as no failure.

        Args:
            source: the state in memory from which the proposed generation starts.
            newest: path of the newest checkpoint; None without one.
            planned: whether the last generation ended for another plan, which is no failure.

        Raises:
            NoProgressError: more generations have failed than `recovery.retries` allows.
        """
        previous = proposal.previous
        if previous is None or previous.attempt != proposal.attempt:
            return 0, 0
        if planned:
            return 0, previous.newest_start
        if source is None and previous.memory is None and _step_of(newest) < _step_of(previous.restore):
            # Its workers found the checkpoint damaged, and it was renamed (`skip_checkpoint`).
            return previous.failures, _step_of(newest)
        progressed = is_new_checkpoint(previous.restore, newest)
        # Later than the start of each of these generations: a step that was reached and lost before is no progress.
        progressed |= source is not None and source.step > previous.newest_start
        failures = 1 if progressed else previous.failures + 1
        if (spent := retries_spent_text(failures, self.run.recovery.retries)) is not None:
            raise NoProgressError(f"{spent}; last: {proposal.reason}")
        return failures, previous.newest_start

    def plan_of(self, record: Generation) -> Plan:
        """Return the plan that a generation runs.

        Raises:
            FileError: the generation's copy of the plan is missing or has errors.
            UntrustedError: the copy or its folder belongs to another user, or others can write to one of them.
        """
        return Plan.read(self.folder / record.plan, owned=True)

    def skip_checkpoint(self, record: Generation, reason: str) -> None:
        """Rename the checkpoint that a generation starts from, and write an event; do nothing if another agent has done
        so, or the checkpoint cannot be renamed.

        Args:
            reason: what a worker found to be wrong, beginning with the checkpoint's name.
        """
        if record.restore is None:
            return
        path = self.folder / record.restore
        aside = published.quarantine(path)
        if aside is not None:
            self.event_log.write("checkpoint_skipped", record.number, reason, path=path.name, now=aside)

    def _memory(self, proposal: Proposal, plan: Plan, newest: str | None) -> MemorySource | None:
        """Return the state in the members' memory to start from; None if they hold no whole one, or none that is as new
        as the newest checkpoint.

        Args:
            plan: the plan of the proposed generation.
            newest: path of the newest checkpoint; None without one.
        """
        plans: dict[int, tuple[str, Plan]] = {}
        for number in sorted({state.generation for states in proposal.held.values() for state in states}):
            with contextlib.suppress(InputError, OSError):  # without its plan, the state cannot be used
                record = proposal.previous  # it may not be published yet
                if record is None or record.number != number:
                    record = Generation.read(record_file(self.folder / GENERATIONS, number), owned=True)
                path = record.plan
                plans[number] = path, Plan.read(self.folder / path, owned=True)
        newer_than = _step_of(newest) - 1
        by_number = {number: old for number, (_, old) in plans.items()}
        choice = choose_restore(proposal.held, by_number, plan, newer_than)
        if choice is None:
            return None
        return MemorySource(
            generation=choice.generation, plan=plans[choice.generation][0], step=choice.step,
            continued=list(choice.continued), holders=list(choice.holders),
        )  # fmt: skip

    def _list_checkpoints(self) -> list[Path]:
        """Return the folders of the run's checkpoints, oldest first, after unfinished ones are removed."""
        with contextlib.suppress(OSError):
            published.discard_unfinished(self.folder / CHECKPOINTS)
        return published.listed(self.folder / CHECKPOINTS)

    def _save_plan(self, pending: _PendingEvents) -> None:
        for name, plan in pending.files.items():
            plan.write(self.folder / name)

    def _announce(self, number: int, pending: _PendingEvents) -> None:
        for kind, reason, data in pending.events:
            self.event_log.write(kind, number, reason, **data)

    def _plan(self, proposal: Proposal, pending: _PendingEvents) -> Plan:
        """Return the plan for the members' nodes: that of the attempt's last generation, or at the beginning of an
        attempt the newest plan in the run folder. If there is none, or it does not fit these nodes, return a new plan.

        Args:
            pending: gets the event about the plan, and with a new plan its copy for the run folder.
        """
        nodes = [member.node for member in proposal.members]
        previous = proposal.previous
        if previous is not None and previous.attempt == proposal.attempt:
            plan = Plan.read(self.folder / previous.plan, owned=True)
            return plan if set(plan.nodes) <= set(nodes) else self._new_plan(proposal, nodes, pending, plan)
        given = newest_plan(self.folder)
        if given is None or (previous is not None and self._is_outdated(given, previous, nodes)):
            return self._new_plan(proposal, nodes, pending)
        away = set(self.nodes) - set(nodes)
        if away and away & set((plan := Plan.read(given, owned=True)).nodes):
            return self._new_plan(proposal, nodes, pending, plan)
        return self._plan_from_folder(given, nodes, pending)

    def _is_outdated(self, given: Path, previous: Generation, nodes: list[str]) -> bool:
        """Whether a new attempt should not use the plan at `given`: the attempt has other nodes than the last
        generation, or its topology's verdict excludes a node of the plan.

        Args:
            previous: the last generation, of an earlier attempt.
            nodes: nodes of the new generation.
        """
        if {member.node for member in previous.members} != set(nodes):
            return True
        return not set(self._topology().verdict.exclude).isdisjoint(Plan.read(given, owned=True).nodes)

    def _plan_from_folder(self, path: Path, nodes: list[str], pending: _PendingEvents) -> Plan:
        """Return the plan at `path` in the run folder. The plan is checked, because a person may have edited it.

        Args:
            nodes: nodes of the proposed generation; the plan may use no others.
            pending: gets the event about the plan.
        """
        plan = Plan.read(path, owned=True)
        check_plan(plan, self.run, self.run.spec(), nodes, str(path))
        check_devices(plan, self._topology(), str(path))
        notes = [note for replica in range(plan.dp) if (note := schedule_of(plan, replica)[1])]
        text = " ".join([f"{path.name} as given: {plan.dims} on {len(plan.nodes)} nodes", *notes])
        pending.events.append(("planned", text, {"plan": path.name, "notes": notes}))
        return plan

    def _new_plan(
        self, proposal: Proposal, nodes: list[str], pending: _PendingEvents, replaced: Plan | None = None
    ) -> Plan:
        """Return a new plan of the planner for `nodes`. The plan is checked like a plan file, so that no worker refuses
        it.

        Args:
            nodes: nodes of the proposed generation.
            pending: gets the event about the plan, and the copy of the plan that users may edit (`plan.json` or
                `plan-<generation>.json` in the run folder).
            replaced: the plan that can no longer run because its nodes are gone; None without one.
        """
        run, spec, lost = self.run, self.run.spec(), len(self.nodes) - len(nodes)
        topology = self._topology()
        first = proposal.previous is None and replaced is None
        if first:
            public, remark = "plan.json", ""
            plan = make_plan(with_fewer_spares(run, lost), spec, topology.only(nodes)).stamped()
        else:
            public = f"plan-{proposal.number}.json"
            measured, profile = self._measured(proposal, topology)
            plan, remark = replan(run, spec, measured.only(nodes), lost, replaced, profile)
            # The speeds are the probe's times what was measured, so the plan belongs to the probe's topology.
            plan = plan.model_copy(update={"topology_sha256": topology.only(nodes).sha256()}).stamped()
        check_plan(plan, run, spec, nodes, public)
        pending.files[public] = plan
        predicted = plan.predicted.step_time_s.get("total") if plan.predicted else None
        text = f"{plan.dims} on {len(plan.nodes)} nodes" + f" ({remark})" * bool(remark)
        data = {"plan": public, **plan.dims._asdict(), "predicted_step_time_s": predicted, "moves": len(plan.moves)}
        pending.events.append(("planned" if first else "replanned", text, data))
        return plan

    def _measured(self, proposal: Proposal, topology: Topology) -> tuple[Topology, CalibrationProfile | None]:
        """Return the topology with the speeds that the steps of the attempt show, and the profile for these; with
        `adapt.mode: off`, and before any speed is known, the topology as it is and the profile of the whole run.

        Args:
            topology: all nodes, with the speeds that the probe measured.
        """
        previous = proposal.previous
        if self.run.adapt_mode != "off" and previous is not None and previous.attempt == proposal.attempt:
            # A plan can be made without what was measured.
            with contextlib.suppress(HpctrainError, OSError):
                times = AttemptTimes(self.folder, self.run, proposal.attempt)
                times.read(previous)
                speeds, plan = times.speeds(), times.plans[previous.number]
                if speeds.devices:
                    measured = apply_changes(topology, speeds.changes)
                    of_plan = measured.only([member.node for member in previous.members])
                    return measured, fitted_profile(self.run, plan, times.rows, speeds, of_plan)
        return topology, self._profile()

    def _topology(self) -> Topology:
        return Topology.read(self.folder / "topology.json", owned=True)

    def _profile(self) -> CalibrationProfile | None:
        """Return the profile from the run's measured steps; None if there is none or it cannot be read, because a plan
        can be made without it."""
        try:
            return learned_profile(self.folder, self.run, self.run.spec())
        except (HpctrainError, OSError):
            return None

    def _checkpoint(self, proposal: Proposal, checkpoints: list[Path], pending: _PendingEvents) -> str | None:
        """Return the path of the newest checkpoint that verifies, relative to the run folder; None if the run has saved
        none. The hashes of its tensors are not checked, because the workers do that when they load them.

        Each newer checkpoint that does not verify is renamed and reported as an event, so that it counts neither as
        progress nor as one of the checkpoints to keep.

        Args:
            checkpoints: the folders of the run's checkpoints, oldest first.
            pending: gets the events.

        Raises:
            RefusedError: the run had saved a checkpoint, and none can be used.
        """
        newest, skipped = published.last_verified(checkpoints, self.run.spec().sha256(), hashes=False)
        if newest is None:
            self._check_no_checkpoint_lost(proposal, skipped)
        for item in skipped:
            aside = published.quarantine(item.path)
            reason = f"{item.path.name}: {item.reason}"
            pending.events.append(("checkpoint_skipped", reason, {"path": item.path.name, "now": aside}))
        return _relative(newest.path) if newest else None

    def _check_no_checkpoint_lost(self, proposal: Proposal, skipped: list[published.SkippedCheckpoint]) -> None:
        """Check that a run without a usable checkpoint had not saved one. If it had, write one event for each of the
        skipped checkpoints, and one that says what to do.

        Checkpoints that do not verify keep their names, and those that the attempt has renamed get theirs back, because
        a file system may come back.

        Args:
            skipped: the checkpoints that do not verify.

        Raises:
            RefusedError: the run had saved a checkpoint.
            FileError, UntrustedError: events.jsonl has errors or is untrusted.
        """
        events = read_events(self.folder / "events.jsonl")
        step = saved_step(events)
        if step is None:
            return
        refused = [f"{item.path.name}: {item.reason}" for item in skipped]
        for item, words in zip(skipped, refused, strict=True):
            self.event_log.write("checkpoint_skipped", proposal.number, words, path=item.path.name)
        for event in events:
            if event.kind == "checkpoint_skipped" and event.attempt == proposal.attempt and event.data.get("now"):
                refused.append(event.reason)
                published.undo_quarantine(self.folder / CHECKPOINTS, event.data["now"], event.data["path"])
        words = lost_checkpoints_error(self.folder, step, refused)
        self.event_log.write("checkpoints_lost", proposal.number, words)
        raise RefusedError(words)


def _relative(checkpoint: Path) -> str:
    """Return the path of a checkpoint's folder within the run folder."""
    return f"{CHECKPOINTS}/{checkpoint.name}"


def _step_of(checkpoint: str | None) -> int:
    """Return the step of a checkpoint's path; 0 for None."""
    return published.step_of(Path(checkpoint) if checkpoint is not None else None)
