"""Estimates the time of a step on nodes that nobody has measured, from the data sheets of their GPUs and from the share
of the data sheet's FLOP/s that published runs reached. Also estimates the error of a planned step time. Pure.
"""

from __future__ import annotations

from hpctrain.base.units import format_si
from hpctrain.jobs.job_price import JobPrice
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.run.run import Run

REACHED_MFU = (0.060, 0.254, 0.507)
"""Share of the data sheet's FLOP/s that training reached, as the quantiles 0.1, 0.5 and 0.9 over 319 problems (a model
on a number of GPUs) of six publications: the best run of each problem, and each publication with the same weight
(`python -m tools.published_runs --utilization`). The range that is computed without a publication holds for 88 % of the
problems of that publication; decision 0095.
"""
LEAST_PARAMETERS = 124_000_000
"""Parameters of the smallest model among the runs of `REACHED_MFU`. A smaller model uses GPUs worse, and no measurement
says how much.
"""
PLAN_ERROR = (0.93, 1.50)
"""Measured time of a step divided by the planned one, as the quantiles 0.1 and 0.9 over published runs that the cost
model was not fitted to, each publication with the same weight (`python -m tools.published_runs`)."""


def data_sheet_step_s(run: Run, spec: Spec, price: JobPrice) -> tuple[float, tuple[float, float]] | str:
    """Return the seconds of a step at the median of `REACHED_MFU`, and (shortest, longest) seconds at its other two
    quantiles; or the reason why nothing can be estimated.

    Args:
        price: the GPUs that the job may get. Of several kinds, the mean of their peaks gives the first result; the
            slowest kind gives the longest seconds, the fastest the shortest.
    """
    if not price.used_gpus:
        return "it computes on CPUs, and there is no data sheet of theirs here"
    if run.precision == "fp32":
        return "in precision fp32 no published run tells what GPUs reach"
    if not price.peaks:
        return "a kind of GPU that the job may get has no data sheet here, or is part of a GPU"
    if spec.parameters() < LEAST_PARAMETERS:
        return f"no published run has so small a model ({format_si(spec.parameters(), '')} parameters)"
    flops = 3 * spec.forward_flops(run.batch.global_, run.data.seq_len) / price.used_gpus
    low, middle, high = REACHED_MFU
    speeds = [peak for _, peak in price.peaks]
    return flops / (middle * sum(speeds) / len(speeds)), (flops / (high * max(speeds)), flops / (low * min(speeds)))


def data_sheet_text(price: JobPrice) -> str:
    """Return a clause that says on which GPUs, and on which share of their peak, the result of `data_sheet_step_s` is
    based.
    """
    kinds = " or ".join(name for name, _ in price.peaks)
    low, middle, high = (f"{share:.0%}".replace("%", " %") for share in REACHED_MFU)
    return (
        f"from data sheets, as nothing was measured on these nodes: {price.used_gpus} × {kinds} at {middle} of their "
        f"peak ({low} to {high}, as 8 of 10 published runs)"
    )
