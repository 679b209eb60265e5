"""From who is left to the record of the next generation: the plan it runs, the checkpoint it starts from."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from pathlib import Path

from hpctrain.agent.agent import Proposal
from hpctrain.agent.journal import Journal
from hpctrain.base.errors import Refused
from hpctrain.planner import make_plan
from hpctrain.records.event import EventKind
from hpctrain.records.generation import Generation, StoreAddress
from hpctrain.records.plan import Plan
from hpctrain.records.run import AutoParallel, Run
from hpctrain.records.topology import Topology
from hpctrain.snapshot import published


@dataclass(frozen=True)
class GenerationMaker:
    """Makes the record that an agent proposes."""

    folder: Path
    run: Run
    journal: Journal

    def __call__(self, proposal: Proposal) -> Generation:
        """The next generation.

        Raises:
            Refused: the model does not fit on what is left.
            FileError: topology or plan cannot be read.
        """
        name, plan = self._plan(proposal)
        first = plan.ranks[0].partition(":")[0]
        host = next(member for member in proposal.members if member.node == first)
        return Generation(
            number=proposal.number,
            attempt=proposal.attempt,
            members=list(proposal.members),
            plan=name,
            store=StoreAddress(addr=host.addr, port=host.store_port, node=first),
            restore=self._checkpoint(proposal),
            reason=proposal.reason,
            failures=proposal.failures,
        )

    def newest_checkpoint(self) -> str | None:
        """Name of the newest published checkpoint, within the run folder."""
        found = published.listed(self.folder / "checkpoints")
        return f"checkpoints/{found[-1].name}" if found else None

    def _plan(self, proposal: Proposal) -> tuple[str, Plan]:
        """The plan in use if all its nodes are there, else a new one for those that are."""
        nodes = [member.node for member in proposal.members]
        name = proposal.previous.plan if proposal.previous else "plan.json"
        path = self.folder / name
        if path.exists():
            plan = Plan.read(path)
            missing = [node for node in plan.nodes if node not in nodes]
            if not missing and not self._on_other_nodes(proposal):
                return name, plan
            if proposal.previous is None:
                raise Refused(
                    f"{path}: it uses {', '.join(missing)}, but this run has {', '.join(nodes)}; "
                    "make a plan for these nodes with `hpctrain plan`"
                )
        return self._new_plan(proposal, nodes)

    def _on_other_nodes(self, proposal: Proposal) -> bool:
        """Whether a new attempt got other nodes than the last one: then all of them are worth planning for."""
        previous = proposal.previous
        if previous is None or previous.attempt == proposal.attempt:
            return False
        return {member.node for member in previous.members} != {member.node for member in proposal.members}

    def _new_plan(self, proposal: Proposal, nodes: list[str]) -> tuple[str, Plan]:
        measured = Topology.read(self.folder / "topology.json")
        topology = measured.only(nodes)
        run, note = self._with_spares_left(len(measured.nodes) - len(nodes)), ""
        if proposal.previous is not None and run.parallel.mode == "fixed":
            # The degrees were chosen for the nodes that were asked for; going on matters more than keeping them.
            run = run.model_copy(update={"parallel": AutoParallel()})
            note = " (parallel.mode fixed does not apply to it)"
        plan = make_plan(run, run.spec(), topology)
        # Two proposers never write the same file; the decided record says which of them counts.
        name = f"generations/plan-{proposal.number:06d}.{secrets.token_hex(4)}.json"
        (self.folder / "generations").mkdir(exist_ok=True)
        plan.write(self.folder / name)
        public = "plan.json" if proposal.previous is None else f"plan-{proposal.number}.json"
        plan.write(self.folder / public)
        kind: EventKind = "planned" if proposal.previous is None else "replanned"
        predicted = plan.predicted.step_time_s.get("total") if plan.predicted else None
        self.journal.write(
            kind,
            proposal.number,
            f"pp {plan.pp} × dp {plan.dp} × tp {plan.tp} on {len(plan.nodes)} nodes{note}",
            plan=public,
            pp=plan.pp,
            dp=plan.dp,
            tp=plan.tp,
            predicted_step_time_s=predicted,
        )
        return name, plan

    def _with_spares_left(self, lost: int) -> Run:
        """The run with a spare less for each node that is gone: they were kept for this."""
        recovery = self.run.recovery
        left = recovery.model_copy(update={"spares": max(0, recovery.spares - lost)})
        return self.run.model_copy(update={"recovery": left})

    def _checkpoint(self, proposal: Proposal) -> str | None:
        """The newest checkpoint that verifies; each one passed over is an event."""
        checkpoints = self.folder / "checkpoints"
        with contextlib.suppress(OSError):
            published.discard_unfinished(checkpoints)
        found, skipped = published.newest(checkpoints, self.run.spec().sha256())
        for item in skipped:
            self.journal.write(
                "checkpoint_skipped", proposal.number, f"{item.path.name}: {item.reason}", path=item.path.name
            )
        return f"checkpoints/{found.path.name}" if found else None
