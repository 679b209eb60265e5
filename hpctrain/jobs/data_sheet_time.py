"""Estimates the time of a step on nodes that nobody has measured, from the data sheets of their GPUs and from the share
of the data sheet's FLOP/s that published runs reached. Also estimates the error of a planned step time. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpctrain.base.units import format_si
from hpctrain.jobs.job_price import JobPrice
from hpctrain.records.model.imported_spec import Spec
from hpctrain.records.run.run import Run
from hpctrain.records.topology.topology import DeviceType

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
PLAN_ERROR = (0.90, 1.36)
"""Measured time of a step divided by the planned one, as the quantiles 0.1 and 0.9 over published runs that the cost
model was not fitted to, each publication with the same weight (`python -m tools.published_runs`)."""

PLAN_ERRORS: Mapping[tuple[str, ...], tuple[float, float]] = {
    ("a100",): (0.85, 1.08),
    ("h100",): (1.03, 1.33),
    ("gh200",): (1.12, 1.39),
    ("v100",): (0.91, 1.53),
    ("t4",): (0.99, 1.62),
    ("rtx", "3090"): (1.18, 1.75),
    ("rtx", "2080"): (1.18, 1.75),
    ("titan", "rtx"): (1.18, 1.75),
}
"""The words that the vendor's name of a GPU has -> quantiles as in `PLAN_ERROR`, over the published runs on such GPUs.
Their steps were predicted from data sheets and published speeds of matrix products, with constants that were fitted
without this kind of run (`measured_by_predicted_of` in the record of `python -m tools.published_runs --json`). The runs
of the last three GPUs used all three kinds together."""


def plan_error_text(device_types: Mapping[str, DeviceType]) -> str:
    """Return a text that says how far planned step times on devices of these types are from measured ones, by published
    runs on such GPUs; or that this is not known.

    Args:
        device_types: name of a type in the topology -> the type.
    """
    known = {key: error for key, kind in device_types.items() if (error := _plan_error(f"{key} {kind.name}"))}
    unknown = " or ".join(key for key in device_types if key not in known)
    if not known:
        return f"Error of the prediction: not known; no published run that was compared used {unknown}."
    ranges = " and ".join(f"{low:.2f} to {high:.2f} times on {key}" for key, (low, high) in known.items())
    return (
        f"Error of the prediction: of published runs with other frameworks, predicted from data sheets, 8 of 10 took "
        f"{ranges} as long as predicted{f'; none used {unknown}' if unknown else ''}."
    )


def _plan_error(name: str) -> tuple[float, float] | None:
    words = set(re.findall("[a-z]+[0-9]*|[0-9]+", name.lower()))
    return next((error for gpu, error in PLAN_ERRORS.items() if words.issuperset(gpu)), None)


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
