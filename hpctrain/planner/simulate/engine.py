"""Timelines of a pipeline step: simulates, action by action, the table that the job will run. Pure arithmetic.

`simulate` records when every action starts and ends. The search needs only the ends of the stages (`stage_ends`), which
are computed faster for long tables: after a few rounds, every two further rounds take equally
long, so two short tables are simulated and extrapolated linearly. The plan that is written is simulated in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from hpctrain.planner.simulate.card_sharing import CardSharing
from hpctrain.records.plan.schedule import Action, Schedule
from hpctrain.schedule.generate import make_schedule
from hpctrain.schedule.resolve import execution_order

SIMULATED_ROUNDS = 3
"""Number of rounds after which an action table is assumed to repeat itself; a round is `pp` micro-batches."""
KINDS = "FBIW"
"""Kinds of actions, in the order of `StageDurations.by_action`."""
ROUND_BASED_SCHEDULES = ("interleaved_1f1b", "interleaved_zero_bubble")
"""Schedules whose first rounds are longer if `pp` does not divide the micro-batches."""
PERIOD_ROUNDS = 2
"""Rounds of a period, after which the pattern of a table repeats itself. Some patterns repeat every second micro-batch,
and two rounds hold an even number of micro-batches.
"""


class StageDurations(NamedTuple):
    """Seconds of actions and messages for one micro-batch, by stage. `blocking` says whether a rank waits while it
    sends; otherwise sends overlap its computation."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    send: tuple[float, ...]
    """send[s]: seconds of the activation from stage s to stage s+1; 0 if both lie on one rank."""
    send_back: tuple[float, ...]
    """send_back[s]: seconds of the gradient from stage s+1 to stage s."""
    inputs: tuple[float, ...] = ()
    """Seconds of the backward for inputs (I) alone; if empty, half of the whole backward."""
    weights: tuple[float, ...] = ()
    """Seconds of the backward for weights (W) alone; if empty, half of the whole backward."""
    blocking: bool = False
    lanes: tuple[int, ...] = ()
    """[message, as in `by_message`] -> number of its lane. Messages of a lane are sent one after the other; all of
    them come from one pipeline rank. If empty, each message has a lane of its own.
    """
    latency: tuple[float, ...] = ()
    """[message, as in `by_message`] -> the seconds of the message in which the next one of its lane is already sent; 0
    if empty.
    """

    def without_sends(self) -> StageDurations:
        """Return the same durations with messages that take no time."""
        nothing = (0.0,) * len(self.send)
        return self._replace(send=nothing, send_back=nothing, latency=())

    def by_action(self) -> list[float]:
        """Return the seconds of the actions as one list: F of all stages, then B of all stages, then I, then W."""
        half = () if self.inputs and self.weights else [0.5 * seconds for seconds in self.backward]
        return [*self.forward, *self.backward, *(self.inputs or half), *(self.weights or half)]

    def by_message(self) -> list[float]:
        """Return the seconds of the messages as one list: those that each stage sends to the next one, then those that
        each stage sends back to the one before it, each in the order of stages."""
        return [*self.send, *self.send_back]

    def lane_of_message(self) -> Sequence[int]:
        """Return the lane of each message, in the order of `by_message`."""
        return self.lanes or range(2 * len(self.send))

    def latency_of_message(self) -> Sequence[float]:
        """Return the latency of each message in seconds, in the order of `by_message`."""
        return self.latency or (0.0,) * (2 * len(self.send))


@dataclass(frozen=True)
class Timeline:
    """When every action of a table starts and ends, in seconds from the start of the step, and which action sends the
    message for which an action waits."""

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]
    """spans[pipeline rank]: (action, start, end) in order."""
    senders: dict[Action, Action]
    """Action -> the action that sends the message for which it waits; actions that wait for no message are absent."""

    @property
    def makespan(self) -> float:
        return max((row[-1][2] for row in self.spans if row), default=0.0)

    def stage_ends(self) -> tuple[float, ...]:
        """Return [stage] -> seconds from the start of the step until its last backward ends, after which the stage's
        gradients are complete."""
        ends = {action.stage: end for row in self.spans for action, _, end in row if action.kind in "BW"}
        return tuple(ends[stage] for stage in range(len(ends)))

    def rank_end(self, rank: int) -> float:
        """Return the seconds from the start of the step until a pipeline rank ends its last action."""
        return self.spans[rank][-1][2] if self.spans[rank] else 0.0


@dataclass(frozen=True)
class ActionProgram:
    """An action table as numbers, sorted so that each action comes after the actions that it waits for.

    The first four fields have an entry for each action. They are columns, and no table of objects, because a search
    keeps hundreds of programs, and Python's garbage collector visits every object.
    """

    ranks: tuple[int, ...]
    """Its pipeline rank."""
    durations: tuple[int, ...]
    """Index into `StageDurations.by_action`."""
    needs: tuple[int, ...]
    """Index of the action of another stage for which it waits, or -1."""
    sends: tuple[int, ...]
    """Index in `StageDurations.by_message` of the message that it sends, or -1."""
    pipeline_ranks: int
    """Number of pipeline ranks."""
    last: tuple[int, ...]
    """[stage] -> index of its last backward."""

    def stage_and_kind(self, index: int) -> tuple[int, str]:
        """Return the stage and the kind (F, B, I or W) of an action."""
        kind, stage = divmod(self.durations[index], len(self.last))
        return stage, KINDS[kind]


def simulate(schedule: Schedule, durations: StageDurations, sharing: CardSharing | None = None) -> Timeline:
    """Return the timeline of an action table: an action starts when its rank is free and its inputs have arrived.

    Sends overlap the sender's computation unless `durations.blocking` is set.

    Args:
        sharing: delays messages that pass beside sums of gradients; None: there are no such sums.

    Raises:
        ValueError: the table cannot be executed (see `hpctrain.schedule.resolve.check_schedule`).
    """
    program, actions = compile_schedule(schedule)
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in schedule.ranks]
    senders: dict[Action, Action] = {}
    starts, ends = _start_and_end_times(program, durations, sharing)
    for action, rank, needs, start, end in zip(actions, program.ranks, program.needs, starts, ends, strict=True):
        spans[rank].append((action, start, end))
        if needs >= 0:
            senders[action] = actions[needs]
    return Timeline(tuple(map(tuple, spans)), senders)


# Of the layouts that local search compares, many share replicas with the same durations.
@lru_cache(maxsize=512)
def stage_ends(
    schedule: str, pp: int, stages: int, micro_batches: int, durations: StageDurations, whole: bool = False
) -> tuple[float, ...]:
    """Return the seconds from the start of the step until each stage ends its last backward. A pipeline rank ends its
    last action when the last of its stages does.

    Args:
        schedule: name of the schedule.
        stages: stages of the model.
        whole: simulate every action instead of extrapolating long tables.

    Raises:
        ValueError: the schedule is unknown, or not defined for these numbers.
    """
    if stages == 1:
        return (_one_stage_s(schedule, micro_batches, durations),)
    short = _simulated_micro_batches(schedule, pp, micro_batches, whole)
    first = _stage_ends(named_program(schedule, pp, stages, short), durations)
    if short == micro_batches:
        return first
    second = _stage_ends(named_program(schedule, pp, stages, short + PERIOD_ROUNDS * pp), durations)
    periods = (micro_batches - short) / (PERIOD_ROUNDS * pp)
    return tuple(a + periods * (b - a) for a, b in zip(first, second, strict=True))


def delayed_stage_ends(
    schedule: str,
    pp: int,
    stages: int,
    micro_batches: int,
    durations: StageDurations,
    ends: Sequence[float],
    sharing: CardSharing,
    whole: bool = False,
) -> tuple[float, ...]:
    """Return the stage ends of a step whose messages share cards with sums of gradients; the other arguments are those
    of `stage_ends`. Of a long table the last rounds are simulated, because sums begin in them.

    Args:
        ends: the stage ends without sums.
        sharing: delays messages that pass beside sums.
    """
    short = _simulated_micro_batches(schedule, pp, micro_batches, whole)
    program = named_program(schedule, pp, stages, short)
    alone = ends if short == micro_batches else _stage_ends(program, durations)
    _, delayed = _start_and_end_times(program, durations, sharing, max(ends) - max(alone))
    last = program.last
    return tuple(end + delayed[index] - before for end, index, before in zip(ends, last, alone, strict=True))


def _simulated_micro_batches(schedule: str, pp: int, micro_batches: int, whole: bool) -> int:
    """Return how many micro-batches of a replica are simulated: all of them, or those of a short table, from which a
    long one is extrapolated. Arguments as in `stage_ends`."""
    remainder = micro_batches % pp
    short = pp * SIMULATED_ROUNDS + remainder * (pp + 1 if schedule in ROUND_BASED_SCHEDULES else 1)
    # The micro-batches after the short table have to be a whole number of periods.
    short += (micro_batches - short) // pp % PERIOD_ROUNDS * pp
    return micro_batches if whole or micro_batches <= short + PERIOD_ROUNDS * pp else short


def _one_stage_s(schedule: str, micro_batches: int, durations: StageDurations) -> float:
    """Return the seconds of a step with one stage, which never waits."""
    kinds = dict.fromkeys(action.kind for action in make_schedule(schedule, 1, 1, 1).ranks[0])
    seconds = durations.by_action()
    return micro_batches * sum(seconds[KINDS.index(kind)] for kind in kinds)


def _stage_ends(program: ActionProgram, durations: StageDurations) -> tuple[float, ...]:
    """Return the seconds from the start of the step until each stage ends its last backward, as in the result of
    `_start_and_end_times` without sharing."""
    by_action, blocking = durations.by_action(), durations.blocking
    lanes = durations.lane_of_message()
    messages = [*zip(lanes, durations.by_message(), durations.latency_of_message(), strict=True), None]
    free, sent = [0.0] * program.pipeline_ranks, [0.0] * (max(lanes, default=0) + 1)
    arrivals, last_ends = list[float](), [0.0] * len(by_action)
    columns = program.ranks, program.durations, program.needs, map(messages.__getitem__, program.sends)
    # The search spends more of its time in this loop than anywhere else, so it does no more than this function needs.
    for rank, duration, needs, message in zip(*columns, strict=True):
        end = free[rank]
        if needs >= 0 and arrivals[needs] > end:
            end = arrivals[needs]
        end += by_action[duration]
        free[rank] = last_ends[duration] = end
        if message is None:
            arrivals.append(end)
        else:
            lane, seconds, latency = message
            arrived = (sent[lane] if sent[lane] > end else end) + seconds
            arrivals.append(arrived)
            sent[lane] = arrived - latency
            if blocking:
                free[rank] = arrived
    return tuple(last_ends[program.durations[index]] for index in program.last)


def _start_and_end_times(
    program: ActionProgram, durations: StageDurations, sharing: CardSharing | None = None, later_s: float = 0.0
) -> tuple[list[float], list[float]]:
    """Return the start and the end of each action of the program, in seconds from the start of the step.

    Args:
        sharing: delays messages that pass beside sums of gradients; None: there are no such sums.
        later_s: seconds by which the simulated actions are later in the step than these times say; `sharing` gets the
            later times.
    """
    by_action, by_message, blocking = durations.by_action(), durations.by_message(), durations.blocking
    lanes, latency = durations.lane_of_message(), durations.latency_of_message()
    free = [0.0] * program.pipeline_ranks
    sent = [0.0] * (max(lanes, default=0) + 1)
    columns = program.ranks, program.durations, program.needs, program.sends
    starts, ends, arrivals = list[float](), list[float](), [0.0] * len(program.ranks)
    for index, (rank, duration, needs, sends) in enumerate(zip(*columns, strict=True)):
        end = free[rank]
        if needs >= 0 and arrivals[needs] > end:
            end = arrivals[needs]
        starts.append(end)
        end += by_action[duration]
        free[rank] = end
        ends.append(end)
        if sends >= 0:
            lane = lanes[sends]
            arrived = sent[lane] if sent[lane] > end else end
            if sharing is None:
                arrived += by_message[sends]
            else:
                alone_s = by_message[sends] - latency[sends]
                arrived = sharing.sent_s(sends, arrived + later_s, alone_s) - later_s + latency[sends]
            arrivals[index] = arrived
            sent[lane] = arrived - latency[sends]
            if blocking:
                free[rank] = arrived
    return starts, ends


@lru_cache(maxsize=1024)
def named_program(schedule: str, pp: int, stages: int, micro_batches: int) -> ActionProgram:
    """Return the action table of a named schedule, as a program for the simulation.

    Args:
        schedule: name of the schedule, such as 1f1b.
        pp: number of pipeline ranks.
        stages: number of stages of the pipeline.
        micro_batches: number of micro-batches of a replica.

    Raises:
        ValueError: the schedule is unknown, or not defined for these numbers.
    """
    program, _ = compile_schedule(make_schedule(schedule, pp, stages, micro_batches))
    return program


def compile_schedule(schedule: Schedule) -> tuple[ActionProgram, tuple[Action, ...]]:
    """Return the program of an action table, and the table's actions in the order of the program.

    Raises:
        ValueError: the table cannot be executed, because actions wait for each other.
    """
    stages = schedule.stages()
    order = execution_order(schedule, stages)
    durations, sent, last = list[int](), list[int](), [0] * stages
    numbers = {kind: number * stages for number, kind in enumerate(KINDS)}
    for index, (_, (stage, kind, _), _) in enumerate(order):
        sends = -1
        if kind == "F":
            if stage < stages - 1:
                sends = stage
        elif kind != "W" and stage > 0:
            sends = stages - 1 + stage - 1
        durations.append(numbers[kind] + stage)
        sent.append(sends)
        if kind in "BW":
            last[stage] = index
    ranks, actions, needs = zip(*order, strict=True) if order else ((), (), ())
    return ActionProgram(ranks, tuple(durations), needs, tuple(sent), len(schedule.ranks), tuple(last)), actions


@dataclass(frozen=True)
class PathSegment:
    """A segment of the critical path: consecutive actions on one pipeline rank, each of which starts when the one
    before it ends.
    """

    rank: int
    actions: tuple[Action, ...]
    start: float
    """Start of the segment, in seconds from the start of the step."""
    end: float
    waited: float
    """Seconds between the end of the previous segment and the start of this one, in which a message travels; 0 for the
    first.
    """


def critical_path(line: Timeline) -> list[PathSegment]:
    """Return the segments of the critical path, from the start of the step to the last action.

    An action starts when its pipeline rank is free and the message for which it waits, if any, has arrived. The path
    goes back from the last action; at each action it follows the later of these two events. Actions that are not on the
    path may be somewhat slower without harm.
    """
    where = {action: (rank, index) for rank, row in enumerate(line.spans) for index, (action, _, _) in enumerate(row)}
    rank = max(range(len(line.spans)), key=line.rank_end)
    index: int = len(line.spans[rank]) - 1
    segments: list[PathSegment] = []
    actions: list[Action] = []
    end = line.rank_end(rank)
    while index >= 0:
        action, start, _ = line.spans[rank][index]
        actions.append(action)
        rank_was_free = line.spans[rank][index - 1][2] if index else 0.0
        if action in line.senders and start - rank_was_free > 1e-12 * (1 + start):
            sender_rank, sender_index = where[line.senders[action]]
            sent = line.spans[sender_rank][sender_index][2]
            segments.append(PathSegment(rank, tuple(reversed(actions)), start, end, start - sent))
            rank, index, actions, end = sender_rank, sender_index, [], sent
        else:
            index -= 1
    segments.append(PathSegment(rank, tuple(reversed(actions)), line.spans[rank][0][1], end, 0.0))
    return segments[::-1]
