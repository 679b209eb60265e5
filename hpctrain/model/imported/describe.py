"""Builds, checks and measures the model of a user's factory, and returns the spec that the planner reads.

The checks find errors that would otherwise show in the middle of a job: pieces (front, blocks, back) that do not fit
one another, blocks that differ, weights that no piece holds, a forward pass that does more than apply the pieces.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hpctrain.base.errors import InputError
from hpctrain.model.imported.checks import (
    TOLERANCE,
    check_forward,
    check_training,
    hidden_state,
    largest_difference,
    logits_of,
    run_split,
)
from hpctrain.model.imported.model import call_factory, check_weights, shapes_of, split_into_pieces, weights_of
from hpctrain.model.imported.user_error import describe_user_error
from hpctrain.records.model.imported_spec import ImportedSpec, Split
from hpctrain.records.model.measured_stack import PartSizes

MAX_TENSOR_PARALLEL = 16
"""The largest tensor-parallel degree that is tried."""


@dataclass(frozen=True)
class DescribeRequest:
    """What the run file says about an imported model, in the keys of `model` (None: the key is absent), and the facts
    that the model's factory may ask for.
    """

    factory: str
    args: dict[str, Any]
    front: list[str] | None
    blocks: str | None
    back: list[str] | None
    tensor_parallel: dict[str, Split]
    tokens: int
    """Number of tokens in the data's vocabulary."""
    seq_len: int
    seed: int
    """Seed of torch's random numbers, set before the factory is called."""


def describe(question: DescribeRequest) -> ImportedSpec:
    """Return the spec of an imported model. The function builds the model, checks it on two sequences and measures it
    on one. This takes the memory of one model and the time of a few passes.

    Raises:
        InputError: factory, names, shapes or weights are wrong, or the blocks cannot be split as `tensor_parallel`
            says; the message is one line.
    """
    torch.manual_seed(question.seed)
    known = {"vocabulary": question.tokens, "seq_len": question.seq_len}
    model = call_factory(question.factory, known, question.args).eval()
    pieces = split_into_pieces(model, question.front, question.blocks, question.back)
    check_weights(pieces)
    # The checks use two sequences, to detect a model with a fixed batch size; the measurement uses one.
    tokens = torch.randint(0, question.tokens, (2, question.seq_len))
    hidden = hidden_state(pieces, tokens)
    logits = logits_of(pieces, hidden, question.tokens)
    check_training(pieces, tokens, question.tokens)
    check_forward(model, tokens, logits)
    tokens, hidden = tokens[:1].clone(), hidden[:1].clone()
    block = pieces.modules(pieces.block_paths)[0]
    degrees, split_parameters, split_bytes = _tensor_parallel(block, hidden, question.tensor_parallel)
    front, back = pieces.modules(pieces.front), pieces.modules(pieces.back)
    shared = {id(weight) for weight in weights_of(front)} & {id(weight) for weight in weights_of(back)}
    return ImportedSpec(
        factory=question.factory,
        args=question.args,
        front=pieces.front,
        blocks=pieces.blocks,
        back=pieces.back,
        tensor_parallel=question.tensor_parallel,
        seq_len=question.seq_len,
        tokens=question.tokens,
        vocab=logits.shape[2],
        layers=len(pieces.block_paths),
        dim=hidden.shape[2],
        front_sizes=measured_sizes(front, tokens, set()),
        block_sizes=measured_sizes([block], hidden, set()),
        back_sizes=measured_sizes(back, hidden, shared),
        split_parameters=split_parameters,
        split_activation_bytes=split_bytes,
        tensor_parallel_degrees=degrees,
        tied=bool(shared),
        weights_sha256=hashlib.sha256(json.dumps(shapes_of(model), sort_keys=True).encode()).hexdigest(),
    )


def measured_sizes(modules: list[nn.Module], x: Tensor, counted: set[int]) -> PartSizes:
    """Return parameters, FLOPs and activation bytes of modules that are applied in turn to one sequence. The modules
    are in evaluation mode afterwards.

    Args:
        modules: the modules.
        x: tokens [1, seq] or hidden state [1, seq, dim].
        counted: `id` of each weight to leave out, because it was already counted.
    """
    parameters = sum(weight.numel() for weight in weights_of(modules) if id(weight) not in counted)

    def forward() -> Tensor:
        y = x.detach().requires_grad_(x.is_floating_point())
        for module in modules:
            y = module(y)
        return y

    for module in modules:
        module.train()
    saved, _ = _saved_for_backward_bytes(forward, weights_of(modules))
    # torch's counter knows the operations of the MATH backend, but not the CPU's fused attention.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        forward()
    for module in modules:
        module.eval()
    return PartSizes(parameters=parameters, flops=counter.get_total_flops(), activation_bytes=saved)


def _saved_for_backward_bytes(forward: Callable[[], Tensor], weights: list[nn.Parameter]) -> tuple[int, Tensor]:
    """Run `forward`; return the bytes that autograd keeps for the backward pass, and the output.

    Each storage counts once; weights do not count.
    """
    left_out = {weight.untyped_storage().data_ptr() for weight in weights}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in left_out:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    return sum(saved.values()), output


def _tensor_parallel(block: nn.Module, x: Tensor, plan: dict[str, Split]) -> tuple[list[int], int, int]:
    """Return the tensor-parallel degrees at which a split block computes what the whole one does, and what is split in
    a block.

    Args:
        block: the whole block.
        x: hidden state of one sequence.
        plan: name of a linear layer in the block -> how it is split: 'columns' or 'rows'.

    Returns:
        The degrees; the block's count of split parameters; the bytes of split activations that it keeps for one
        sequence. Without a plan: [], 0, 0.

    Raises:
        InputError: no degree works.
    """
    if not plan:
        return [], 0, 0
    split_parameters, widths = _split_parameters(block, plan)
    x = x.detach().requires_grad_()
    whole, expected = _saved_for_backward_bytes(lambda: block(x), list(block.parameters()))
    degrees: list[int] = []
    split_bytes = 0
    reasons: list[str] = []
    for tp in range(2, MAX_TENSOR_PARALLEL + 1):
        if any(width % tp for width in widths):
            continue
        saved, difference, text = _try_split(block, x, plan, tp, expected)
        if text is None and difference < TOLERANCE:
            degrees.append(tp)
            split_bytes = split_bytes or max(0, (whole - saved) * tp // (tp - 1))
        else:
            wrong = f"split in {tp} it computes something else (largest relative difference {difference:.2g})"
            reasons.append(text or wrong)
    if not degrees:
        widest = ", ".join(map(str, sorted(set(widths))))
        reason = next(iter(reasons), f"the widths {widest} have no common divisor up to {MAX_TENSOR_PARALLEL}")
        raise InputError(
            f"model.tensor_parallel: a block cannot be split like this: {reason}; use a linear each for query, key and "
            "value, take the number of heads from the width that comes in, or leave tensor_parallel out"
        )
    return degrees, split_parameters, min(split_bytes, whole)


def _try_split(
    block: nn.Module, x: Tensor, plan: dict[str, Split], tp: int, expected: Tensor
) -> tuple[int, float, str | None]:
    """Run a block split over `tp` devices, and compare its output with that of the whole block.

    Args:
        block: the whole block.
        x: hidden state of one sequence.
        plan: name of a linear layer in the block -> how it is split: 'columns' or 'rows'.
        tp: number of devices.
        expected: output of the whole block.

    Returns:
        The bytes that one device keeps for the backward pass, the largest relative difference of the outputs, and None;
        if the split block cannot run, 0, infinity and the text of the error.
    """
    seen: list[int] = []

    def first(share: nn.Module) -> Tensor:
        saved, output = _saved_for_backward_bytes(lambda: share(x), list(share.parameters()))
        seen.append(saved)
        return output

    try:
        output = run_split(block, x, plan, tp, first)
    except Exception as error:
        return 0, math.inf, f"split in {tp} it raises {describe_user_error(error)}"
    return seen[0], largest_difference(output, expected.detach()), None


def _split_parameters(block: nn.Module, plan: dict[str, Split]) -> tuple[int, list[int]]:
    """Return the number of a block's parameters that are split, and the widths that the tensor-parallel degree must
    divide.

    Args:
        block: the whole block.
        plan: name of a linear layer in the block -> how it is split: 'columns' or 'rows'.

    Raises:
        InputError: a name in the plan is not that of a linear layer in the block.
    """
    count, widths = 0, []
    linears = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    for name, split in plan.items():
        if name not in linears:
            raise InputError(
                f"model.tensor_parallel: no linear {name!r} in a block; it has {', '.join(linears) or 'no linear'}"
            )
        linear = linears[name]
        count += linear.weight.numel()
        if split == "columns" and linear.bias is not None:
            count += linear.bias.numel()
        widths.append(linear.out_features if split == "columns" else linear.in_features)
    return count, widths
