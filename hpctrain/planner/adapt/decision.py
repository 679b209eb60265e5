"""Decides whether a run takes another plan because of the measured speeds of its devices, and whether a plan that was
taken stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from hpctrain.base.errors import HpctrainError, InputError
from hpctrain.base.units import format_seconds
from hpctrain.planner.adapt.answers import possible_answers
from hpctrain.planner.adapt.measured import MeasuredSpeeds
from hpctrain.planner.layout.plan_conversion import layout_of_plan
from hpctrain.planner.replan.calibration import MIN_STEPS, WARMUP_STEPS, fit_profile
from hpctrain.planner.replan.replan import apply_changes
from hpctrain.planner.simulate.predict import predict
from hpctrain.records.history.layer_figures import LayerFigures
from hpctrain.records.history.run_log import MetricRow
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.plan.plan import Plan
from hpctrain.records.plan.profile import CalibrationProfile
from hpctrain.records.run.adapt import AdaptMode
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import Topology


@dataclass(frozen=True)
class AdaptLimits:
    """How much a new plan must gain, how long a run waits between two changes of plan, and when a new plan is taken
    back."""

    min_gain: float = 0.05
    """Least share of a step by which a new plan must be faster."""
    other_degrees_gain: float = 0.2
    """Least share of a step by which a new plan with another pp or tp must be faster, because predictions of plans that
    differ so much from the present one are less exact. Such a plan must also be faster by this share than the new plans
    with the present pp and tp."""
    near_best: float = 0.03
    """Share by which a plan may be slower than the fastest one if it changes less of the present plan."""
    price_factor: float = 2.0
    """The steps that remain must gain at least this many times the price of the change of plan."""
    wait_steps: int = 100
    """Steps without a speed change that must pass before the second change of plan in an attempt; each further change
    of plan needs twice as many as the one before. A change of plan that corrects the probe's figures does not
    count."""
    judge_steps: int = 100
    """Steps after which a new plan is judged (`judge`)."""
    tolerance: float = 0.1
    """Share by which a step of a new plan may be longer than predicted."""
    max_scale: float = 2.0
    """Largest factor between the predicted and the measured step of the present plan, in either direction; beyond it,
    predictions say nothing about the gain of another plan."""


DEFAULT_ADAPT_LIMITS = AdaptLimits()


@dataclass(frozen=True)
class PlanChange:
    """A change of plan without a fault, earlier in the attempt."""

    step: int
    """Last step before the change."""
    replaced: Plan
    """The plan before the change."""
    plan: Plan
    """The plan after the change."""
    before_s: float
    """Measured seconds of a step before the change."""
    predicted_s: float
    """Predicted seconds of a step after the change."""
    takes_back: bool = False
    """Whether the change took back the change of plan before it."""
    corrects_probe: bool = False
    """Whether the change comes from the attempt's first comparison of plans, before which no speed changed: it corrects
    the probe's figures."""


@dataclass(frozen=True)
class Situation:
    """What `decide` depends on."""

    run: Run
    spec: Spec
    topology: Topology
    """The nodes that live, with the speeds that the probe measured."""
    plan: Plan
    """The plan that runs."""
    speeds: MeasuredSpeeds
    """The measured speeds."""
    rows: Sequence[MetricRow]
    """Rows of metrics.jsonl of the present generation, in order: the first `WARMUP_STEPS` and those since
    `speeds.steady_since`, or more."""
    mode: AdaptMode
    """When the run may take another plan."""
    after: int
    """Steps of the attempt after which the first decision is made."""
    asked: bool
    """Whether the run file states the mode; then an edited plan and fixed degrees do not keep the run from adapting."""
    began: int
    """Last step before the attempt began."""
    move_s: float
    """Price of a change of plan: seconds from the start of a generation's workers to the end of its first step."""
    decided: int | None = None
    """Step of the attempt's last decision (`AdaptDecision.made`); None before the first."""
    moves: Sequence[PlanChange] = ()
    """Earlier changes of plan in the attempt, in order."""
    edited: bool = False
    """Whether a person wrote or edited the plan."""
    lost: int = 0
    """Number of nodes that the run has lost."""
    layers: tuple[LayerFigures, ...] = ()
    """What was measured of the layers, over all ranks; empty: nothing."""

    @property
    def step(self) -> int:
        """Return the number of the last step that was made."""
        return self.rows[-1].step if self.rows else self.began


@dataclass(frozen=True)
class AdaptDecision:
    """Whether the run takes another plan."""

    reason: str
    """Why, in one sentence for people."""
    plan: Plan | None = None
    """The plan to take; None: the present one stays."""
    made: bool = False
    """Whether plans were compared. If not, the decision is asked for again when there are more rows."""
    before_s: float | None = None
    """Measured seconds of a step of the present plan."""
    predicted_s: float | None = None
    """Predicted seconds of a step of `plan`."""


def decide(now: Situation, limits: AdaptLimits = DEFAULT_ADAPT_LIMITS) -> AdaptDecision:
    """Return whether the run takes another plan, made for the measured speeds.

    The first decision of an attempt is made after `Situation.after` steps. With mode online, another one follows each
    speed change. A new plan is taken if its step is predicted to be shorter by `min_gain`, and if the steps that remain
    gain `price_factor` times the price of a change of plan. Of the plans that are nearly as fast as the fastest one
    (`near_best`), the run takes the one that changes least of the present plan. After each change of plan, speeds must
    stay as they are for longer before the next one (`wait_steps`). So a device whose speed goes up and down more often
    than every `2 * wait_steps` steps causes two changes of plan at most. The change of plan by the first decision does
    not count if no speed changed before, because it corrects the probe's figures.
    """
    if (reason := _why_stay(now) or _why_wait(now, limits)) is not None:
        return AdaptDecision(reason)
    before_s = _step_s(now)
    try:
        topology = apply_changes(now.topology, now.speeds.changes)
        profile = fitted_profile(now.run, now.plan, now.rows, now.speeds, topology)
        old = now.plan.model_copy(update={"profile": profile})
        scene = layout_of_plan(now.run, now.spec, old, topology)
        expected_s = predict(scene.cost, scene.layout, whole=True).total
        plans = possible_answers(now.run, now.spec, topology, now.lost, scene, now.plan, profile, now.layers)
    except HpctrainError as error:
        return AdaptDecision(f"no other plan can be compared: {error}", made=True)
    scale = before_s / expected_s
    if not 1 / limits.max_scale <= scale <= limits.max_scale:
        return AdaptDecision(
            f"a step takes {format_seconds(before_s)} and was predicted to take {format_seconds(expected_s)}, so "
            "predictions of other plans say nothing",
            made=True,
        )
    plans = [plan for plan in plans if not _was_taken_back(now, plan)]
    if not plans:
        return AdaptDecision(
            "the best plan found was taken back before, because it was slower than predicted", made=True
        )
    answers = [(plan, plan.predicted.step_time_s["total"] * scale) for plan in plans if plan.predicted is not None]
    reasons = [_why_not(now, plan, before_s, after_s, limits) for plan, after_s in answers]
    good = [answer for answer, reason in zip(answers, reasons, strict=True) if reason is None]
    if not good:
        fastest = min(range(len(answers)), key=lambda number: answers[number][1])
        return AdaptDecision(reasons[fastest] or "", made=True)

    def cautious_s(answer: tuple[Plan, float]) -> float:
        """Return the seconds of a step with which a plan is compared with others."""
        return answer[1] if _is_alike(answer[0], now.plan) else answer[1] / (1 - limits.other_degrees_gain)

    best_s = min(map(cautious_s, good))
    plan, after_s = next(answer for answer in good if cautious_s(answer) <= (1 + limits.near_best) * best_s)
    slow = now.speeds.reasons()
    text = (
        f"{'; '.join(slow[:3]) or 'measured stage times differ from the predicted ones'}{' …' * (len(slow) > 3)}: "
        f"{plan.dims} on {len(plan.nodes)} nodes is predicted to take {format_seconds(after_s)} a step instead of "
        f"{format_seconds(before_s)}"
    )
    # The speeds are those of the probe's topology times what was measured, so the plan belongs to that topology.
    plan = plan.model_copy(update={"topology_sha256": now.topology.sha256()}).stamped()
    return AdaptDecision(text, plan, True, before_s, after_s)


def _why_stay(now: Situation) -> str | None:
    """Return why the run never takes another plan, whatever is measured; None if it may."""
    if now.mode == "off":
        return "adapt.mode is off"
    if len(now.topology.device_ids()) == 1:
        return "there is one device, so there is no other plan"
    if now.edited and not now.asked:
        return "a person wrote or edited the plan, so it is obeyed; state adapt.mode in the run file to adapt it"
    if not now.asked and now.run.parallel.mode == "fixed":
        return "parallel.mode is fixed; state adapt.mode in the run file to adapt cuts and devices"
    return None


def _why_wait(now: Situation, limits: AdaptLimits) -> str | None:
    """Return why no plans are compared now; None if they are."""
    done = now.step - now.began
    steady = now.step - now.speeds.steady_since + 1
    if now.decided is None and done < now.after:
        return f"the first decision is made after {now.after} steps, and {done} are done"
    if now.decided is not None:
        if now.mode == "once":
            return "adapt.mode is once, and plans were compared"
        if now.speeds.changed_at is None or now.speeds.changed_at <= now.decided:
            return "no device's speed has changed since the last decision"
    if not now.speeds.devices or len(_timed(now.rows, now.speeds)) < MIN_STEPS:
        return "too few steps of this generation were measured"
    if now.speeds.undecided:
        return "the speed of a device may be changing"
    moves = [move for move in now.moves if not move.corrects_probe]
    needed = limits.wait_steps * 2 ** (len(moves) - 1) if moves else 0
    steady = min(steady, now.step - now.moves[-1].step) if moves else steady
    if steady < needed:
        return f"speeds have not changed for {steady} steps, and after {len(moves)} moves it must be {needed}"
    return None


def _why_not(now: Situation, plan: Plan, before_s: float, after_s: float, limits: AdaptLimits) -> str | None:
    """Return why a plan is not taken; None if it may be.

    Args:
        before_s: seconds of a step of the present plan.
        after_s: predicted seconds of a step of `plan`.
    """
    if same_layout(plan, now.plan):
        return "the present plan is the best one found for the measured speeds"
    least = limits.min_gain if _is_alike(plan, now.plan) else limits.other_degrees_gain
    return _too_little(now, before_s, after_s, least, limits)


def _is_alike(a: Plan, b: Plan) -> bool:
    """Return whether two plans have the same pipeline and tensor parallelism."""
    return (a.pp, a.tp) == (b.pp, b.tp)


def _was_taken_back(now: Situation, plan: Plan) -> bool:
    """Return whether the attempt has taken back this plan, or a plan with the same pp and tp, if the present plan has
    another pp or tp: predictions for these degrees were wrong on these nodes."""
    bad = [move.replaced for move in now.moves if move.takes_back]
    return any(same_layout(plan, old) or (_is_alike(plan, old) and not _is_alike(plan, now.plan)) for old in bad)


def _too_little(
    now: Situation, before_s: float, after_s: float, min_gain: float, limits: AdaptLimits
) -> str | None:  # fmt: skip
    """Return why a plan gains too little; None if it gains enough.

    Args:
        before_s: seconds of a step of the present plan.
        after_s: predicted seconds of a step of the other plan.
        min_gain: least share of a step by which the other plan must be faster.
    """
    gain_s, remaining = before_s - after_s, now.run.steps - now.step
    if gain_s < min_gain * before_s:
        return (
            f"the best plan found shortens a step by {100 * gain_s / before_s:.1f} %, and a move needs "
            f"{100 * min_gain:g} %"
        )
    if gain_s * remaining < limits.price_factor * now.move_s:
        return (
            f"another plan would save {format_seconds(gain_s * remaining)} in the {remaining} steps that remain, and a "
            f"move needs {format_seconds(limits.price_factor * now.move_s)}, {limits.price_factor:g} times its price"
        )
    return None


def _timed(rows: Sequence[MetricRow], speeds: MeasuredSpeeds) -> list[MetricRow]:
    """Return the rows of the steps with the present speeds, without the generation's first steps and without steps that
    fp16 skipped."""
    return [row for row in rows[WARMUP_STEPS:] if row.step >= speeds.steady_since and not row.skipped]


def _step_s(now: Situation) -> float:
    return median(row.step_time_s for row in _timed(now.rows, now.speeds)[-100:])


def fitted_profile(
    run: Run, plan: Plan, rows: Sequence[MetricRow], speeds: MeasuredSpeeds, topology: Topology
) -> CalibrationProfile | None:  # fmt: skip
    """Return the factors with which predictions of a plan fit its measured steps; None if none can be fitted.

    Args:
        run: the run file.
        plan: the plan whose steps were measured.
        rows: its rows of metrics.jsonl, in order: the first `WARMUP_STEPS` and those since `speeds.steady_since`.
        speeds: the measured speeds.
        topology: the nodes of the plan with these speeds.
    """
    try:
        return fit_profile(plan, run, run.spec(), topology, [*rows[:WARMUP_STEPS], *_timed(rows, speeds)], "this run")
    except InputError:
        return None


def same_layout(a: Plan, b: Plan) -> bool:
    """Return whether two plans compute the same on the same devices, whatever their predictions and notes are."""
    names = (
        "zero", "shard", "sequence_parallel", "tensor_parallel_sums", "schedule", "stages", "replicas", "compression",
        "actions",
    )  # fmt: skip
    return all(getattr(a, name) == getattr(b, name) for name in names)


@dataclass(frozen=True)
class Judgement:
    """Whether the steps of a new plan take as long as predicted."""

    reason: str
    """The predicted and the measured time of a step, and what follows, in one sentence."""
    take_back: bool = False
    """Whether the run takes the plan before the change again."""
    measured_s: float | None = None
    """Median seconds of a step after the change; None if the new plan cannot be judged."""


def judge(
    move: PlanChange, rows: Sequence[MetricRow], speeds: MeasuredSpeeds, limits: AdaptLimits = DEFAULT_ADAPT_LIMITS
) -> Judgement | None:
    """Return whether the steps of a new plan take as long as predicted; None before `judge_steps` steps (twice as many
    while the speed of a device may be changing), or if too few steps were measured.

    A plan is taken back if its step is longer than predicted by more than `tolerance`, and no shorter than that of the
    plan before it. A plan to which the run came back is not taken back. If a device's speed has changed since the
    change of plan, the prediction does not hold any more, and nothing is taken back; then it is not waited for
    `judge_steps` steps, so that plans can be compared for the new speeds.

    Args:
        move: the last change of plan of the attempt.
        rows: rows of metrics.jsonl of the generation that began with this change, in order.
        speeds: the speeds that were measured since the change.
        limits: when a plan is taken back.
    """
    timed = [row.step_time_s for row in rows[WARMUP_STEPS:] if not row.skipped]
    if len(timed) < MIN_STEPS:
        return None
    done = rows[-1].step - move.step
    if speeds.changed_at is None and done < limits.judge_steps * (2 if speeds.undecided else 1):
        return None
    measured_s = median(timed)
    words = f"a step takes {format_seconds(measured_s)}, predicted were {format_seconds(move.predicted_s)}"
    if speeds.changed_at is not None:
        return Judgement(f"{words}; the speed of a device changed since, so this says nothing about the plan")
    if measured_s <= (1 + limits.tolerance) * move.predicted_s:
        return Judgement(f"{words}: it came true", measured_s=measured_s)
    before = f"before the move it took {format_seconds(move.before_s)}"
    if measured_s < move.before_s or move.takes_back:
        return Judgement(f"{words}; {before}, so the plan stays", measured_s=measured_s)
    return Judgement(f"{words}; {before}, so the plan before it is taken again", True, measured_s)
