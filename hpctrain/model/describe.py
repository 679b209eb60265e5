"""From a person's factory to the record that the planner works from: pieces by name, checked and measured.

Every mistake that would show up only in the middle of a job is looked for here: pieces that do not fit one another,
blocks that differ, weights that no piece holds, a forward pass that does something else.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hpctrain.base.errors import InputError
from hpctrain.model.factory import around, call_factory, find_blocks, last_words, submodule
from hpctrain.model.imported import block_names
from hpctrain.model.split_check import TOLERANCE, largest_difference, run_split
from hpctrain.records.imported_spec import ImportedSpec, PartSizes, Split

MOST_DEVICES = 16
"""The largest tensor-parallel degree that is tried out."""


@dataclass(frozen=True)
class Question:
    """What the run file says about the model."""

    factory: str
    args: dict[str, Any]
    front: list[str] | None
    blocks: str | None
    back: list[str] | None
    tensor_parallel: dict[str, Split]
    tokens: int
    """Size of the data's vocabulary."""
    seq_len: int
    seed: int


@dataclass(frozen=True)
class Pieces:
    """A model taken apart."""

    model: nn.Module
    front: list[str]
    blocks: str
    back: list[str]

    @property
    def block_paths(self) -> list[str]:
        return block_names(self.model, self.blocks)

    def modules(self, paths: Iterable[str]) -> list[nn.Module]:
        return [self.model.get_submodule(path) for path in paths]


def describe(question: Question) -> ImportedSpec:
    """Make the model, check it and measure it on one sequence. Takes its memory once, and a pass through it.

    Raises:
        InputError: what is wrong with factory, names, shapes or weights, in a line.
    """
    torch.manual_seed(question.seed)
    known = {"vocabulary": question.tokens, "seq_len": question.seq_len}
    model = call_factory(question.factory, known, question.args).eval()
    pieces = _take_apart(model, question)
    _check_weights(pieces)
    tokens = torch.randint(0, question.tokens, (1, question.seq_len))
    hidden = _front(pieces, tokens)
    logits = _through(pieces, hidden)
    if logits.dim() != 3 or logits.shape[:2] != tokens.shape or logits.shape[2] < question.tokens:
        raise InputError(
            f"model.back: {', '.join(pieces.back)} gave a tensor of shape {tuple(logits.shape)}; expected logits "
            f"[1, {question.seq_len}, {question.tokens} or more]"
        )
    _check_forward(model, tokens, logits)
    block = pieces.modules(pieces.block_paths)[0]
    degrees, split_parameters, split_bytes = _tensor_parallel(block, hidden, question.tensor_parallel)
    front, back = pieces.modules(pieces.front), pieces.modules(pieces.back)
    shared = {id(weight) for weight in _weights(front)} & {id(weight) for weight in _weights(back)}
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
        front_sizes=_sizes(front, tokens, set()),
        block_sizes=_sizes([block], hidden, set()),
        back_sizes=_sizes(back, hidden, shared),
        split_parameters=split_parameters,
        split_activation_bytes=split_bytes,
        tensor_parallel_degrees=degrees,
        tied=bool(shared),
        weights_sha256=_weights_sha256(model),
    )


def _take_apart(model: nn.Module, question: Question) -> Pieces:
    blocks = question.blocks or find_blocks(model)
    container = submodule(model, blocks, "model.blocks")
    if not isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential) or not len(container):
        raise InputError(
            f"model.blocks: {blocks} is a {type(container).__name__} of {len(list(container.children()))} modules; "
            "allowed: a ModuleList, ModuleDict or Sequential with the blocks in it"
        )
    if len(list(container.children())) != len(container):
        raise InputError(f"model.blocks: {blocks} holds the same module more than once; each block needs its own")
    before, after = around(model, blocks)
    front = question.front if question.front is not None else before
    back = question.back if question.back is not None else after
    for field, paths in (("model.front", front), ("model.back", back)):
        if not paths:
            raise InputError(f"{field}: nothing lies on that side of {blocks}; name the modules that are applied there")
        for path in paths:
            submodule(model, path, field)
    return Pieces(model, front, blocks, back)


def _check_weights(pieces: Pieces) -> None:
    """Every weight belongs to one piece, is fp32 and trained, and all blocks have the same ones."""
    model, paths = pieces.model, pieces.block_paths
    shapes = [_shapes(block) for block in pieces.modules(paths)]
    for path, found in zip(paths, shapes, strict=True):
        if found != shapes[0]:
            other = sorted(set(found.items()) ^ set(shapes[0].items()))[0]
            raise InputError(
                f"model.blocks: {path} is not like {paths[0]}: they differ in {other[0]} {list(other[1])}; all blocks "
                "need the same weights"
            )
    held = {id(w) for w in _weights(pieces.modules([*pieces.front, *paths, *pieces.back]))}
    counts = sum(len({id(w) for w in block.parameters()}) for block in pieces.modules(paths))
    ends = {id(w) for w in _weights(pieces.modules([*pieces.front, *pieces.back]))}
    if len(held - ends) != counts:
        raise InputError(
            "model.blocks: blocks share weights with one another or with front or back; that cannot be cut"
        )
    for name, weight in model.named_parameters():
        if id(weight) not in held:
            raise InputError(
                f"model: the weight {name} is in none of front ({', '.join(pieces.front)}), {pieces.blocks} and back "
                f"({', '.join(pieces.back)}); put it into a module that is named there"
            )
        if weight.dtype != torch.float32 or not weight.requires_grad:
            kind = str(weight.dtype) if weight.dtype != torch.float32 else "requires_grad False"
            raise InputError(f"model.import: weight {name}: found {kind}; all weights are fp32 and trained")


def _front(pieces: Pieces, tokens: Tensor) -> Tensor:
    """The hidden state, from the front modules."""
    x = tokens
    with torch.no_grad():
        for path in pieces.front:
            x = _apply(pieces, path, x, "model.front")
    if x.dim() != 3 or x.shape[:2] != tokens.shape:
        raise InputError(
            f"model.front: {', '.join(pieces.front)} gave a tensor of shape {tuple(x.shape)}; expected a hidden state "
            f"[{tokens.shape[0]}, {tokens.shape[1]}, dim]"
        )
    return x


def _through(pieces: Pieces, hidden: Tensor) -> Tensor:
    """Logits, through all blocks and the back modules."""
    buffers = {name: buffer.clone() for name, buffer in pieces.model.named_buffers()}
    with torch.no_grad():
        x = hidden
        for path in pieces.block_paths:
            x = _apply(pieces, path, x, "model.blocks")
            if x.shape != hidden.shape:
                raise InputError(
                    f"model.blocks: {path} gave a tensor of shape {tuple(x.shape)}; expected that of its input, "
                    f"{tuple(hidden.shape)}"
                )
        for path in pieces.back:
            x = _apply(pieces, path, x, "model.back")
    _check_buffers(pieces, hidden, buffers)
    return x


def _check_buffers(pieces: Pieces, hidden: Tensor, before: dict[str, Tensor]) -> None:
    """Only parameters are trained and saved: a buffer that a training pass changes would be lost."""
    block = pieces.modules(pieces.block_paths)[0]
    block.train()
    with torch.no_grad():
        block(hidden)
    block.eval()
    for name, buffer in pieces.model.named_buffers():
        if name in before and not torch.equal(torch.nan_to_num(buffer), torch.nan_to_num(before[name])):
            raise InputError(f"model.blocks: the forward pass changes the buffer {name}; only parameters are saved")


def _apply(pieces: Pieces, path: str, x: Tensor, field: str) -> Tensor:
    try:
        output = pieces.model.get_submodule(path)(x)
    except Exception as error:
        around_it = f"front is {', '.join(pieces.front)}; back is {', '.join(pieces.back)}"
        text = f"{field}: {path} cannot be applied to what comes before it, of shape {tuple(x.shape)}"
        raise InputError(f"{text}: {last_words(error)}; {around_it}") from error
    if not isinstance(output, Tensor):
        raise InputError(f"{field}: {path} gave a {type(output).__name__}; allowed: one tensor")
    return output


def _check_forward(model: nn.Module, tokens: Tensor, logits: Tensor) -> None:
    """Where the model's own forward pass gives logits, they are those of its pieces applied in turn."""
    try:
        with torch.no_grad():
            output = model(tokens)
    except Exception:
        return  # it wants other arguments, or there is none: the pieces alone count
    if isinstance(output, tuple) and output:
        output = output[0]
    if not isinstance(output, Tensor) or output.shape != logits.shape:
        return
    difference = largest_difference(output, logits)
    if not difference < TOLERANCE:
        raise InputError(
            f"model.import: the model's own forward pass gives other logits than its pieces applied in turn (largest "
            f"relative difference {difference:.2g}); each of front, blocks and back must do all of its part itself"
        )


def _sizes(modules: list[nn.Module], x: Tensor, counted: set[int]) -> PartSizes:
    """Sizes of modules that are applied in turn to x, one sequence."""
    parameters = sum(weight.numel() for weight in _weights(modules) if id(weight) not in counted)

    def forward() -> Tensor:
        y = x.detach().requires_grad_(x.is_floating_point())
        for module in modules:
            y = module(y)
        return y

    for module in modules:
        module.train()
    kept, _ = _kept_bytes(forward, _weights(modules))
    # The CPU's fused attention is no operation that torch's counter knows; in its parts it is.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        forward()
    for module in modules:
        module.eval()
    return PartSizes(parameters=parameters, flops=counter.get_total_flops(), activation_bytes=kept)


def _kept_bytes(forward: Callable[[], Tensor], weights: list[nn.Parameter]) -> tuple[int, Tensor]:
    """Bytes that autograd keeps for a backward pass of `forward`, each memory once, and its output."""
    left_out = {weight.untyped_storage().data_ptr() for weight in weights}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in left_out:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    return sum(kept.values()), output


def _tensor_parallel(block: nn.Module, x: Tensor, plan: dict[str, Split]) -> tuple[list[int], int, int]:
    """(degrees at which the split block is right, parameters that are split, kept bytes that are split)."""
    if not plan:
        return [], 0, 0
    split_parameters, widths = _split_parameters(block, plan)
    x = x.detach().requires_grad_()
    whole, expected = _kept_bytes(lambda: block(x), list(block.parameters()))
    degrees: list[int] = []
    split_bytes = 0
    reason = f"the widths {', '.join(map(str, sorted(set(widths))))} have no common divisor up to {MOST_DEVICES}"
    for tp in range(2, MOST_DEVICES + 1):
        if any(width % tp for width in widths):
            continue
        kept, difference, text = _try_split(block, x, plan, tp, expected)
        if text is None and difference < TOLERANCE:
            degrees.append(tp)
            split_bytes = split_bytes or max(0, (whole - kept) * tp // (tp - 1))
        else:
            reason = text or f"split in {tp} it computes something else (largest relative difference {difference:.2g})"
    if not degrees:
        raise InputError(
            f"model.tensor_parallel: a block cannot be split like this: {reason}; use a linear each for query, key and "
            "value, take the number of heads from the width that comes in, or leave tensor_parallel out"
        )
    return degrees, split_parameters, min(split_bytes, whole)


def _try_split(
    block: nn.Module, x: Tensor, plan: dict[str, Split], tp: int, expected: Tensor
) -> tuple[int, float, str | None]:
    """(bytes that one device keeps, relative difference to the whole block, what was raised)."""
    seen: list[int] = []

    def first(share: nn.Module) -> Tensor:
        kept, output = _kept_bytes(lambda: share(x), list(share.parameters()))
        seen.append(kept)
        return output

    try:
        output = run_split(block, x, plan, tp, first)
    except Exception as error:
        return 0, math.inf, f"split in {tp} it raises {last_words(error)}"
    return seen[0], largest_difference(output, expected.detach()), None


def _split_parameters(block: nn.Module, plan: dict[str, Split]) -> tuple[int, list[int]]:
    """Parameters that are split, and the widths that the degree must divide.

    Raises:
        InputError: a name is no linear of a block.
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


def _weights(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Each weight of the modules once."""
    found = {id(weight): weight for module in modules for weight in module.parameters()}
    return list(found.values())


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in module.named_parameters()}


def _weights_sha256(model: nn.Module) -> str:
    return hashlib.sha256(json.dumps(_shapes(model), sort_keys=True).encode()).hexdigest()
