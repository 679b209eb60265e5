"""Billing units of a job by a partition's TRESBillingWeights (slurm.conf(5)). Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Literal

BillingRule = Literal["sum", "max", "max_without_gres"]
"""How the weighted resources of a job are combined: their sum; with PriorityFlags=MAX_TRES the largest; with
MAX_TRES_GRES the largest of CPUs and memory, plus the GRES."""
_WEIGHT = re.compile(r"([A-Za-z][\w/:.-]*)=(\d{1,15}(?:\.\d{1,15})?|\.\d{1,15})([KMGTP]?)B?", re.IGNORECASE | re.ASCII)
_MIB = {"K": 2**-10, "M": 1.0, "G": 2**10, "T": 2**20, "P": 2**30}


def billing_rule(flags: str) -> BillingRule:
    """Return how the weighted resources of a job are combined, by the setting PriorityFlags."""
    names = {name.strip().upper() for name in flags.split(",")}
    return "max_without_gres" if "MAX_TRES_GRES" in names else "max" if "MAX_TRES" in names else "sum"


def parse_billing_weights(text: str) -> dict[str, float]:
    """Return the weights in a partition's TRESBillingWeights by the resource's name in lower case:
    'CPU=1.0,Mem=0.25G,GRES/gpu:a100=16' -> {'cpu': 1.0, 'mem': 0.25 / 1024, 'gres/gpu:a100': 16.0}. The weight of
    memory is per MiB. An item that is no weight is left out.
    """
    weights = {}
    for item in text.split(","):
        match = _WEIGHT.fullmatch(item.strip())
        if match is None:
            continue
        name, unit = match[1].lower(), match[3].upper()
        if unit and name != "mem":
            continue  # hpctrain counts only CPUs, memory and GPUs, of which only memory has units
        weights[name] = float(match[2]) / (_MIB[unit] if unit else 1.0)
    return weights


def billing_units(resources: Mapping[str, float], weights: Mapping[str, float], rule: BillingRule) -> float | None:
    """Return the billing units that Slurm charges for one hour of a job with these resources; None if the weights name
    a resource whose amount is not in `resources`, such as a licence.

    Args:
        resources: amount by the name of the resource: cpu, mem in MiB, node, gres/gpu, gres/gpu:a100.
        weights: weights by the name of the resource, as of `parse_billing_weights`.
    """
    if not weights.keys() <= resources.keys():
        return None
    weighted = {name: resources[name] * weight for name, weight in weights.items()}
    if rule == "sum":
        return math.fsum(weighted.values())
    if rule == "max":
        return max(weighted.values(), default=0.0)
    apart = [value for name, value in weighted.items() if name.startswith("gres/")]
    return max((value for name, value in weighted.items() if not name.startswith("gres/")), default=0.0) + sum(apart)
