"""Simulation of a pipeline step, action by action, on the table that the job will run. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpctrain.records.plan.schedule import Action, Schedule


@dataclass(frozen=True)
class StageDurations:
    """Seconds of actions and messages for one micro-batch, by stage."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    send: tuple[float, ...]
    """send[s]: activation from stage s to stage s+1; 0 if both lie on one rank."""
    send_back: tuple[float, ...]
    """send_back[s]: gradient from stage s+1 to stage s."""
    inputs: tuple[float, ...] = ()
    """The backward for inputs (I) alone; if empty, half of the whole backward."""
    weights: tuple[float, ...] = ()
    """The backward for weights (W) alone; if empty, half of the whole backward."""
    blocking: bool = False
    """Whether a rank waits while it sends; else sends overlap its computation."""

    def without_sends(self) -> StageDurations:
        """The same durations with messages that take no time."""
        nothing = (0.0,) * len(self.send)
        return replace(self, send=nothing, send_back=nothing)


@dataclass(frozen=True)
class Timeline:
    """When every action of a table starts and ends, in seconds from the start of the step."""

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]
    """spans[pipeline rank]: (action, start, end) in order."""

    @property
    def makespan(self) -> float:
        return max((row[-1][2] for row in self.spans if row), default=0.0)

    def rank_end(self, rank: int) -> float:
        """When a pipeline rank ends its last action and its gradients can be summed, in seconds."""
        return self.spans[rank][-1][2] if self.spans[rank] else 0.0

    def busy(self, rank: int) -> float:
        """Seconds that a pipeline rank computes."""
        return sum(end - start for _, start, end in self.spans[rank])

    def bubble(self, rank: int) -> float:
        """Seconds that a pipeline rank waits, before, between and after its actions."""
        return self.makespan - self.busy(rank)


def simulate(schedule: Schedule, durations: StageDurations) -> Timeline:
    """Simulate the table: an action starts when its rank is free and its inputs have arrived.

    Sends overlap the sender's computation unless `durations.blocking` is set.

    Raises:
        ValueError: the table cannot be executed (see `hpctrain.schedule.check_schedule`).
    """
    stages = len(durations.forward)
    done: dict[tuple[int, str, int], float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in schedule.ranks]
    free = [0.0] * len(schedule.ranks)
    left = sum(len(row) for row in schedule.ranks)
    while left:
        before = left
        for rank, row in enumerate(schedule.ranks):
            while len(spans[rank]) < len(row):
                action = row[len(spans[rank])]
                ready = _ready(action, durations, stages, done)
                if ready is None:
                    break
                start = max(free[rank], ready)
                end = start + _duration(action, durations)
                spans[rank].append((action, start, end))
                free[rank] = end + (_send(action, durations) if durations.blocking else 0.0)
                done[action.stage, "B" if action.kind == "I" else action.kind, action.micro_batch] = end
                left -= 1
        if left == before:
            raise ValueError("the action table cannot be executed: every pipeline rank waits for another")
    return Timeline(tuple(tuple(row) for row in spans))


def _ready(
    action: Action, durations: StageDurations, stages: int, done: dict[tuple[int, str, int], float]
) -> float | None:
    """When the action's inputs have arrived, in seconds; None while that is not known."""
    stage, kind, micro_batch = action
    if kind == "F":
        if stage == 0:
            return 0.0
        ended = done.get((stage - 1, "F", micro_batch))
        return None if ended is None else ended + durations.send[stage - 1]
    own = done.get((stage, "B" if kind == "W" else "F", micro_batch))
    if own is None or kind == "W" or stage == stages - 1:
        return own
    ended = done.get((stage + 1, "B", micro_batch))
    return None if ended is None else max(own, ended + durations.send_back[stage])


def _send(action: Action, durations: StageDurations) -> float:
    """Seconds of the message that carries an action's result to the next or previous stage."""
    if action.kind == "F":
        return durations.send[action.stage] if action.stage < len(durations.send) else 0.0
    return durations.send_back[action.stage - 1] if action.kind in ("B", "I") and action.stage > 0 else 0.0


def _duration(action: Action, durations: StageDurations) -> float:
    if action.kind == "F":
        return durations.forward[action.stage]
    half = {"I": durations.inputs, "W": durations.weights}.get(action.kind)
    if half:
        return half[action.stage]
    return durations.backward[action.stage] * (1.0 if action.kind == "B" else 0.5)
