"""Says while a run trains whether another plan is worth a generation (`RunPlanAdviser`). The decisions are pure
functions in `planner/adapt`; this module has their files."""

from __future__ import annotations

from pathlib import Path

from hpctrain.agent.event_log import EventLog
from hpctrain.agent.worker_messages import ChangePlanOrder
from hpctrain.checkpoint.memory.choose import pieces_of
from hpctrain.launch.preflight.checks import check_plan
from hpctrain.node.attempt_times import AttemptTimes
from hpctrain.planner.adapt.decision import PlanChange, Situation, decide, judge
from hpctrain.planner.simulate.goodput import DEFAULT_RECOVERY_S
from hpctrain.records.history.adapted_plan import AdaptedPlan, adapted_plan_file
from hpctrain.records.history.generation import GENERATIONS, Generation, new_plan_name
from hpctrain.records.plan.plan import Plan
from hpctrain.records.run.run import Run


class RunPlanAdviser:
    """The adviser of one attempt. The agent of rank 0's node asks it (`agent/next_generation.py`)."""

    def __init__(self, folder: Path, run: Run, nodes: tuple[str, ...], event_log: EventLog, attempt: int) -> None:
        """Prepare to advise; no file is read.

        Args:
            folder: the run folder.
            nodes: nodes that the attempt began with.
            event_log: gets the events that compare the measured step time of each new plan with the predicted one.
        """
        self._folder, self._run, self._nodes, self._event_log = folder, run, nodes, event_log
        self._times = AttemptTimes(folder, run, attempt)
        self._decided: int | None = None
        self._judged = -1
        """Number of the newest generation whose plan was judged."""

    def advise(self, record: Generation, step: int) -> ChangePlanOrder | None:
        """Return the order to end a generation for another plan, once a document names that plan; else None.

        Args:
            record: the generation that trains.
            step: a step that it has done.

        Raises:
            HpctrainError: a file of the run cannot be read or written, has errors or is untrusted; or the cost model
                cannot predict a plan of the attempt.
        """
        self._times.read(record)
        moves = self._times.moves()
        if moves and moves[-1][0] == record.number and not self._was_judged(record.number):
            return self._judge(record, moves[-1][1])
        return self._compare(record, [move for _, move in moves])

    def _was_judged(self, number: int) -> bool:
        return self._judged >= number or any(
            event.kind == "adaptation_measured" and event.generation == number for event in self._times.events
        )

    def _judge(self, record: Generation, move: PlanChange) -> ChangePlanOrder | None:
        """Compare the measured step time of a new plan with the predicted one and write the event, if enough steps are
        done. Return the order to take the plan before it again, if the new one makes steps longer; else None."""
        judgement = judge(move, self._times.rows, self._times.speeds())
        if judgement is None:
            return None
        self._judged = record.number
        data = {"predicted_step_time_s": move.predicted_s, "measured_step_time_s": judgement.measured_s}
        self._event_log.write(
            "adaptation_measured", record.number, judgement.reason, **data, kept=not judgement.take_back
        )
        if not judgement.take_back or judgement.measured_s is None:
            return None
        times_s = judgement.measured_s, move.before_s
        return self._order(record, move.replaced, judgement.reason, times_s, taken_back=True)

    def _compare(self, record: Generation, moves: list[PlanChange]) -> ChangePlanOrder | None:
        times, plan, start_s = self._times, self._times.plans[record.number], self._times.start_s()
        assert times.topology is not None, "it was read"
        decided = moves[-1].step if self._decided is None and moves else self._decided
        now = Situation(
            run=self._run, spec=self._run.spec(), topology=times.topology, plan=plan,
            speeds=times.speeds(), rows=times.rows, mode=self._run.adapt_mode,
            after=self._run.adapt.after, asked=self._run.adapt.mode is not None, began=times.began,
            move_s=DEFAULT_RECOVERY_S if start_s is None else start_s, decided=decided, moves=moves,
            edited=plan.is_edited, lost=len(self._nodes) - len(record.members),
            layers=times.layers,
        )  # fmt: skip
        decision = decide(now)
        if not decision.made:
            return None
        self._decided = times.rows[-1].step
        times.leave_out_new_steps()
        print(f"hpctrain agent: plans were compared after step {self._decided}: {decision.reason}", flush=True)
        if decision.plan is None or decision.before_s is None or decision.predicted_s is None:
            return None
        times_s = decision.before_s, decision.predicted_s
        # The speeds are those of this generation; in an earlier one they may have changed.
        corrects_probe = decided is None and now.speeds.changed_at is None and len(times.records) == 1
        return self._order(record, decision.plan, decision.reason, times_s, corrects_probe=corrects_probe)

    def _order(
        self, record: Generation, plan: Plan, reason: str, times_s: tuple[float, float],
        *, corrects_probe: bool = False, taken_back: bool = False,
    ) -> ChangePlanOrder:  # fmt: skip
        """Write which plan comes next, and return the order to end the present generation.

        Args:
            plan: the plan that comes next.
            times_s: seconds of a step: measured with the present plan, and predicted with the next one.
            corrects_probe: as in `AdaptedPlan`.
            taken_back: as in `AdaptedPlan`.
        """
        nodes = [member.node for member in record.members]
        name = new_plan_name(record.number + 1)
        check_plan(plan, self._run, self._run.spec(), nodes, name)
        plan.write(self._folder / name)
        before_s, predicted_s = times_s
        adapted = AdaptedPlan(
            generation=record.number, plan=name, reason=reason, measured_step_time_s=before_s,
            predicted_step_time_s=predicted_s, corrects_probe=corrects_probe, taken_back=taken_back,
        )  # fmt: skip
        adapted.write(adapted_plan_file(self._folder / GENERATIONS, record.number))
        old = self._times.plans[record.number]
        pieces = pieces_of(old)
        in_reach = {pieces[rank] for rank, device in enumerate(old.ranks) if device.node in plan.nodes}
        return ChangePlanOrder(save=in_reach != set(pieces.values()))
