"""Goodput of a long job whose nodes fail, by checkpoint interval and recovery mode.

Goodput is the training that was not lost again, in seconds of the whole cluster, divided by the elapsed time. Nodes
fail at a constant rate, independently of each other, also while the job recovers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hpctrain.records.run.recovery import Recovery

DEFAULT_RECOVERY_S = Recovery().heartbeat_timeout_s + 2.0
"""Seconds from a failure to the next step with recovery in place.

A silent node is noticed after heartbeat_timeout_s; 2 s are added for the restart. In a test, four local nodes went on
1.6 s after the loss of one of them was noticed (docs/results/runtime.md).
"""

RecoveryMode = Literal["requeue", "in_place", "spares"]
RECOVERY_MODES: tuple[RecoveryMode, ...] = ("requeue", "in_place", "spares")
"""Recovery modes that can be simulated.

requeue: the job ends and starts again from the queue, with all its nodes. in_place: the job goes on with the remaining
nodes. spares: idle nodes of the allocation take over; the job goes on with fewer nodes only when no spare is left. In
the last two modes, a repaired node joins at the next failure, because only then does a new generation begin.
"""


@dataclass(frozen=True)
class FailureModel:
    """A job's nodes, the rate of their failures, and the seconds that checkpoints and recoveries take."""

    nodes: int
    """Number of nodes that train, without spares."""
    node_mtbf_s: float
    """Mean seconds between failures of one node."""
    stall_s: float
    """Seconds for which a checkpoint stops training."""
    save_s: float
    """Seconds from the start of a checkpoint until it can be used; training goes on meanwhile."""
    recover_s: float
    """Seconds from a failure until training goes on from a checkpoint, with recovery in place."""
    queue_s: float = 0.0
    """Seconds in the queue until the job has started; a requeue adds them to `recover_s`."""
    repair_s: float = math.inf
    """Seconds from the failure of a node until the node or a replacement is available."""
    spares: int = 0
    """Number of idle nodes of the allocation."""
    min_nodes: int = int(Recovery.model_fields["min_nodes"].default)
    """Least number of nodes of a job that recovers in place. With fewer nodes the job is requeued, or ends for good if
    queue_s is infinite.
    """


@dataclass(frozen=True)
class Goodput:
    """Goodput over many simulated trials with one checkpoint interval and recovery mode: mean and 5th percentile as
    shares of the elapsed time; and the mean number of failures in a trial.
    """

    interval_s: float
    """Seconds of training between two checkpoints."""
    mode: RecoveryMode
    """Recovery mode, one of `RECOVERY_MODES`."""
    mean: float
    """Mean of the goodput over the trials."""
    p05: float
    """5th percentile of the goodput: 95 of 100 trials are better."""
    failures: float
    """Mean number of failures of training nodes in a trial."""


def daly_interval(cluster: FailureModel) -> float:
    """Return the seconds of training between two checkpoints with which the goodput is highest: √(2·stall·M) − stall,
    but at least the stall.

    `stall` is the seconds for which a checkpoint stops training, and M the mean seconds between failures of the whole
    job. The formula is Daly 2006 (FGCS 22/3), equation (8), to first order; without the subtraction it is Young 1974
    (CACM 17/9).
    """
    mtbf_s = cluster.node_mtbf_s / cluster.nodes
    return max(cluster.stall_s, math.sqrt(2 * cluster.stall_s * mtbf_s) - cluster.stall_s)


def daly_goodput(cluster: FailureModel, interval_s: float) -> float:
    """Return the expected goodput if every failure costs the same time and the number of nodes does not change.

    By Daly 2006 (FGCS 22/3), section 3, τ seconds of training take M·e^(R/M)·(e^((τ + δ)/M) − 1) seconds. δ is the time
    of a checkpoint, which can be used at once afterwards, R the recovery time and M the mean time between failures of
    the job. The goodput is τ divided by these seconds.

    Args:
        interval_s: seconds of training between two checkpoints (τ).
    """
    mtbf_s = cluster.node_mtbf_s / cluster.nodes
    down_s = cluster.recover_s + cluster.queue_s
    exponent = (interval_s + cluster.stall_s) / mtbf_s
    if down_s / mtbf_s > 500 or exponent > 500:
        return 0.0
    return interval_s / (mtbf_s * math.exp(down_s / mtbf_s) * math.expm1(exponent))


def simulate_goodput(
    cluster: FailureModel, mode: RecoveryMode, intervals_s: Sequence[float], wall_s: float, trials: int, seed: int
) -> list[Goodput]:
    """Return the goodput of each checkpoint interval over simulated trials. All intervals and modes use the same random
    numbers.

    Args:
        intervals_s: seconds of training between two checkpoints, for each result.
        wall_s: length of a trial in seconds.
    """
    if mode != "spares":
        cluster = replace(cluster, spares=0)
    results = []
    for interval_s in intervals_s:
        months = [_Trial(cluster, mode, interval_s, np.random.default_rng([seed, trial])) for trial in range(trials)]
        shares: NDArray[np.float64] = np.array([month.run(wall_s) for month in months]) / wall_s
        failures = sum(month.failures for month in months) / trials
        results.append(Goodput(interval_s, mode, float(shares.mean()), float(np.quantile(shares, 0.05)), failures))
    return results


class _Trial:
    """One trial: a time of given length in which nodes fail at random, simulated from failure to failure."""

    def __init__(self, cluster: FailureModel, mode: RecoveryMode, interval_s: float, rng: np.random.Generator) -> None:
        self.cluster = cluster
        self.mode = mode
        self.interval_s = interval_s
        self.rng = rng
        self.failures = 0
        self.away: list[float] = []
        """Times in seconds at which each lost node will be available again."""

    def run(self, wall_s: float) -> float:
        """Return the seconds of training that are not lost again. A second in which only a share of the nodes trains
        counts as that share of a second.

        Args:
            wall_s: length of the trial in seconds.
        """
        now = lasting = down_until = 0.0
        while now < wall_s and down_until < math.inf:
            # A failure may come while the job recovers; the recovery then starts again.
            failure = now + self._exponential()
            end = min(failure, wall_s)
            start = min(max(now, down_until), end)
            lasting += self._checkpointed_seconds(end - start, whole=end == wall_s) * self._speed()
            now = end
            if now < wall_s:
                # A job that waits in the queue does not start sooner because a node fails meanwhile.
                down_until = max(down_until, now + self._fail(now))
        return lasting

    def _exponential(self) -> float:
        working = self.cluster.nodes - self._short()
        return float(self.rng.exponential(self.cluster.node_mtbf_s / max(1, working)))

    def _short(self) -> int:
        """Return the number of nodes that training lacks: failed nodes that no spare node replaces."""
        return max(0, len(self.away) - self.cluster.spares)

    def _speed(self) -> float:
        return 1 - self._short() / self.cluster.nodes

    def _checkpointed_seconds(self, seconds: float, whole: bool) -> float:
        """Return the seconds of training that are not lost, out of a time between two failures or at the trial's end.

        Training counts up to the last checkpoint that could be used at the failure that ends the time.

        Args:
            seconds: length of the time.
            whole: True if the trial's end, and no failure, ends the time; then all training in it counts.
        """
        cycle = self.interval_s + self.cluster.stall_s
        if whole:
            return seconds - self.cluster.stall_s * math.floor(seconds / cycle)
        usable = max(0.0, seconds - max(0.0, self.cluster.save_s - self.cluster.stall_s))
        return self.interval_s * math.floor(usable / cycle)

    def _fail(self, now: float) -> float:
        """Record the failure of a node, and return the seconds until training goes on.

        Args:
            now: time of the failure in seconds from the start of the trial.
        """
        self.failures += 1
        self.away = [back for back in self.away if back > now]
        if self.mode == "requeue":
            return self.cluster.recover_s + self.cluster.queue_s
        self.away.append(now + self.cluster.repair_s)
        if self.cluster.nodes - self._short() >= self.cluster.min_nodes:
            return self.cluster.recover_s
        self.away = []  # the next job starts with all its nodes
        return self.cluster.recover_s + self.cluster.queue_s
