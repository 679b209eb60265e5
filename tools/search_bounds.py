"""Measures what each lower bound of the plan search gives: CPU seconds, predicted step and gap of searches with all
bounds and without each of them (docs/results/planner.md).

    python -m tools.search_bounds [CASE ...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from hpctrain.bench.planner.search import ALL_CASES, scene_of_case
from hpctrain.planner import PlanRequest, make_plan
from hpctrain.planner.bounds import knapsack
from hpctrain.planner.bounds.knapsack import KnapsackBound
from hpctrain.planner.bounds.rank_times import PipelinePasses
from hpctrain.planner.search import many_devices, option_search, space, state
from hpctrain.planner.search.space import EXHAUSTIVE_DEVICES, OptionBounds
from hpctrain.planner.simulate.predict import TimedLayout

CASES = ("paper-32-1.3B", "unlike-32-7B", "mixed-32x3-3GBs-1.3B-64", "unlike-256-7B", "mixed-256x4-12.5GBs-7B-256")
"""Cases of `hpctrain bench plan` that are measured unless others are given."""
Replacement = tuple[Any, str, Any]
"""(module or class, name in it, what stands there instead)."""


def always(value: object) -> Callable[..., object]:
    """Return a function that returns a value whatever its arguments are."""
    return lambda *_, **__: value


VARIANTS: dict[str, tuple[Replacement, ...]] = {
    "all": (),
    "closed form": ((OptionBounds, "step_s", lambda bounds, option: bounds.work_s(option.dims, option.micro_batch)),),
    "pass through the pipeline": ((PipelinePasses, "step_s", always(0.0)),),
    "memory check": ((OptionBounds, "can_hold", always(True)), (OptionBounds, "is_too_large", always(False))),
    "knapsack": (
        (KnapsackBound, "feasible_within", always(True)),
        (KnapsackBound, "may_finish_within", always(True)),
        (KnapsackBound, "bracket", lambda bound, low, high, memory=True: (low, high)),
    ),
    "waits of interleaved stages": ((knapsack, "cap_by_passes", lambda classes, caps, both, remaining_s: caps),),
    "bound of a layout": ((TimedLayout, "bound_s", 0.0),),
    "none; search of up to 64": tuple(
        (module, "EXHAUSTIVE_DEVICES", 10**6) for module in (space, many_devices, option_search, state)
    ),
}
"""Which bound is left out -> what stands in its place. The last variant is for cases of more than 64 devices: it brings
all bounds to them."""


def main(names: list[str]) -> None:
    """Print a line for each case and variant: CPU seconds, step and gap."""
    for name in names or CASES:
        case = next(case for case in ALL_CASES if case.name == name)
        run, topology = scene_of_case(case)
        for variant, replacements in VARIANTS.items():
            if variant.startswith("none") and case.gpus <= EXHAUSTIVE_DEVICES:
                continue
            with ExitStack() as stack:
                for holder, attribute, instead in replacements:
                    stack.enter_context(patch.object(holder, attribute, instead))
                started = time.process_time()
                plan = make_plan(run, run.spec(), topology, PlanRequest(neighbours=False))
            seconds = time.process_time() - started
            assert plan.predicted is not None, "the planner predicts what it makes"
            assert plan.predicted.bound_s is not None, "and bounds it"
            step_s = plan.predicted.step_time_s["total"]
            gap = 1 - plan.predicted.bound_s / step_s
            print(f"{name:28} {variant:28} {seconds:6.1f} s  step {step_s:.4g} s  gap {gap:.1%}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
