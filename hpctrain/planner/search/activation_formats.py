"""Chooses the formats in which activations travel between nodes, for a layout and its gradient codec: those of messages
between stages, and those of tensor parallelism's sums."""

from __future__ import annotations

from hpctrain.base.units import format_seconds
from hpctrain.planner.cost.model import CostModel
from hpctrain.planner.search.codec_choice import MIN_GAIN, choose_messages
from hpctrain.planner.simulate.predict import Prediction, predict
from hpctrain.records.plan.compression import AutoCompression
from hpctrain.records.run.run import Run

Choice = tuple[CostModel, Prediction, list[str]]
"""The cost model with the chosen formats, the predicted step, and a reason for each choice."""


def choose_activation_formats(run: Run, cost: CostModel, best: Prediction) -> Choice:
    """Return the formats that the run file asks for or, where it says auto, the best ones for a layout. A reason is
    given where there was a choice.

    Args:
        cost: the cost model with the layout's memory options and gradient codec.
        best: the layout with its predicted step.
    """
    lossy = isinstance(run.compression, AutoCompression) and run.compression.lossy
    reasons: list[str] = []
    if run.compression.messages == "auto":
        cost, best, reasons = choose_messages(cost, best.layout, lossy)
    if run.compression.tensor_sums == "auto" and any(unit.spans_nodes for unit in best.layout.units()):
        cost, best, why = _choose_tensor_parallel_sums(cost, best, lossy or run.precision == "bf16")
        reasons = [*reasons, *why]
    return cost, best, reasons


def _choose_tensor_parallel_sums(cost: CostModel, best: Prediction, may_round: bool) -> Choice:
    """Choose bf16 if it saves the share `MIN_GAIN` of a step and the run may round activations.

    Args:
        may_round: whether activations may be rounded to bf16. In a run with precision bf16 they may, because matrix
            products round their results in the same way; what they cost a run in fp32 is not known.
    """
    in_bf16 = cost.with_work(tensor_parallel_sums="bf16")
    other = predict(in_bf16, best.layout, whole=True)
    exact_s, rounded_s = format_seconds(best.total), format_seconds(other.total)
    if 1 - other.total / best.total < MIN_GAIN:
        return cost, best, ["Tensor parallelism sums exactly between nodes: in bf16 too little is won."]
    if may_round:
        reason = f"Tensor parallelism sums in bf16 between nodes: a step of {rounded_s}, with exact sums {exact_s}."
        return in_bf16, other, [reason]
    reason = (
        f"Tensor parallelism sums exactly between nodes: a step of {exact_s}. compression.tensor_parallel bf16 would "
        f"make it {rounded_s}, but rounds activations, which auto does only with precision bf16 or lossy: true."
    )
    return cost, best, [reason]
