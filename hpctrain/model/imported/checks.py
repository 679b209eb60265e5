"""Checks of an imported model: its pieces (front, blocks, back) fit one another, its own forward pass does no more than
the pieces do, and split blocks compute the same as whole ones.

Training applies the pieces in turn and computes the loss itself. Anything else that the model's own forward pass does
or returns would be lost, so a model that does more is refused before a job is queued.

A wrong split by `model.tensor_parallel` often has fitting shapes (as a fused query-key-value matrix by columns) and
trains another model. So the split block is run, with one thread per device, and compared with the whole block.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.base.errors import InputError
from hpctrain.model.imported.model import Pieces
from hpctrain.model.imported.user_error import describe_user_error
from hpctrain.records.model.imported_spec import Split

TOLERANCE = 1e-4
"""Largest allowed difference between two results that should be equal, in fp32, relative to the largest magnitude of
the expected one.
"""
WAIT_S = 120.0
"""Seconds that `run_split` waits for each device's thread."""


@dataclass
class _ThreadAllReduce:
    """An all-reduce among threads, each of which stands for a device."""

    barrier: threading.Barrier
    parts: list[Tensor]
    """Tensor of each thread, by the thread's rank."""

    def __call__(self, rank: int, part: Tensor) -> Tensor:
        self.parts[rank] = part
        self.barrier.wait()
        total = torch.stack([part.detach() for part in self.parts]).sum(0)
        self.barrier.wait()
        # The sum of the other threads is added as a constant, so that autograd keeps only what one device would keep.
        return part + (total - part.detach())


class _RowParallelLinear(nn.Module):
    """One device's part of a linear layer that is split by rows: `total` sums the parts' results, and the bias is added
    once.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, total: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias) if bias is not None else None
        self.total = total

    def forward(self, x: Tensor) -> Tensor:
        total = self.total(F.linear(x, self.weight))
        return total if self.bias is None else total + self.bias


def run_split(
    block: nn.Module, x: Tensor, plan: dict[str, Split], tp: int, first: Callable[[nn.Module], Tensor]
) -> Tensor:
    """Run a block split over `tp` devices, each of which is a thread; return the output on the first device.

    Args:
        block: the whole block.
        x: [batch, seq, dim], equal on every device.
        plan: name of a linear layer in the block -> how it is split: 'columns' or 'rows'.
        tp: number of devices.
        first: runs the forward pass of the first device, given the device's part of the block.

    Raises:
        Exception: the error that the block raised on one of the devices.
        TimeoutError: the first device did not end within `WAIT_S` seconds.
    """
    outputs: dict[int, Tensor] = {}
    errors: list[Exception] = []
    barrier = threading.Barrier(tp)
    shares = _shares(block, plan, tp, barrier)

    def work(rank: int) -> None:
        try:
            output = first(shares[0]) if rank == 0 else shares[rank](x)
            outputs[rank] = output.detach()
        except threading.BrokenBarrierError:
            pass  # another thread failed and reports its error
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    if errors:
        raise errors[0]
    if 0 not in outputs:
        raise TimeoutError(f"no end after {WAIT_S:g} s")
    return outputs[0]


def largest_difference(output: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected magnitude; infinite if the shapes differ."""
    if output.shape != expected.shape:
        return float("inf")
    return float((output - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def _shares(block: nn.Module, plan: dict[str, Split], tp: int, barrier: threading.Barrier) -> list[nn.Module]:
    sums = {name: _ThreadAllReduce(barrier, [torch.empty(0)] * tp) for name in plan}
    return [_share(block, plan, tp, rank, sums) for rank in range(tp)]


def _share(
    block: nn.Module, plan: dict[str, Split], tp: int, rank: int, sums: dict[str, _ThreadAllReduce]
) -> nn.Module:
    share = copy.deepcopy(block)
    for name, split in plan.items():
        linear = share.get_submodule(name)
        weight: Tensor = linear.weight.detach()  # type: ignore[operator]
        bias: Tensor | None = linear.bias  # type: ignore[assignment]
        if split == "rows":
            part = weight.chunk(tp, dim=1)[rank].clone()
            bias = None if bias is None else bias.detach()
            share.set_submodule(name, _RowParallelLinear(part, bias, partial(sums[name], rank)))
            continue
        linear.weight = nn.Parameter(weight.chunk(tp, dim=0)[rank].clone())
        linear.out_features = linear.weight.shape[0]  # type: ignore[assignment]
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach().chunk(tp)[rank].clone())
    return share


def hidden_state(pieces: Pieces, tokens: Tensor) -> Tensor:
    """Return the hidden state [batch, seq, dim] of tokens [batch, seq], computed by the front modules.

    Raises:
        InputError: the modules cannot be applied in turn, or return something other than a hidden state.
    """
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


def logits_of(pieces: Pieces, hidden: Tensor, tokens: int) -> Tensor:
    """Return the logits [batch, seq, vocabulary] of a hidden state, through all blocks and the back modules.

    Args:
        pieces: the model and its pieces.
        hidden: [batch, seq, dim].
        tokens: number of tokens in the data's vocabulary; the logits must be at least as wide.

    Raises:
        InputError: the modules cannot be applied in turn, or return something other than logits.
    """
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
    if x.dim() != 3 or x.shape[:2] != hidden.shape[:2] or x.shape[2] < tokens:
        raise InputError(
            f"model.back: {', '.join(pieces.back)} gave a tensor of shape {tuple(x.shape)}; expected logits "
            f"[{hidden.shape[0]}, {hidden.shape[1]}, {tokens} or more]"
        )
    return x


def check_training(pieces: Pieces, tokens: Tensor, vocabulary: int) -> None:
    """Check that a forward pass in training mode works and changes no buffer.

    Its tensors must have the shapes of a pass in evaluation mode. Buffers must not change, because checkpoints hold
    only parameters.

    Args:
        pieces: the model and its pieces.
        tokens: [batch, seq].
        vocabulary: number of tokens in the data's vocabulary.

    Raises:
        InputError: the pass fails, returns tensors of other shapes or changes a buffer.
    """
    before = {name: buffer.clone() for name, buffer in pieces.model.named_buffers()}
    pieces.model.train()
    logits_of(pieces, hidden_state(pieces, tokens), vocabulary)
    pieces.model.eval()
    for name, buffer in pieces.model.named_buffers():
        if name in before and not torch.equal(torch.nan_to_num(buffer), torch.nan_to_num(before[name])):
            raise InputError(f"model.import: the forward pass changes the buffer {name}; only parameters are saved")


def _apply(pieces: Pieces, path: str, x: Tensor, field: str) -> Tensor:
    try:
        output = pieces.model.get_submodule(path)(x)
    except Exception as error:
        around_it = f"front is {', '.join(pieces.front)}; back is {', '.join(pieces.back)}"
        text = f"{field}: {path} cannot be applied to what comes before it, of shape {tuple(x.shape)}"
        raise InputError(f"{text}: {describe_user_error(error)}; {around_it}") from error
    if not isinstance(output, Tensor):
        when = " in training" if pieces.model.training else ""
        raise InputError(f"{field}: {path} gave a {type(output).__name__}{when}; allowed: one tensor")
    return output


BESIDE_LOGITS = ("past_key_values", "hidden_states", "attentions", "cross_attentions")
"""Fields of transformers' model outputs, besides the logits, that do not affect the loss."""

_REMEDY = (
    "training calls front, blocks and back in turn, and its loss is cross-entropy with the next token: give the logits "
    "alone, or leave forward out"
)


def check_forward(model: nn.Module, tokens: Tensor, logits: Tensor) -> None:
    """Check that a model's own forward pass, if it has one, returns the logits of its pieces and nothing else. It may
    return those of the last position only. In training mode, only the shape is checked.

    Args:
        model: the model.
        tokens: [batch, seq].
        logits: logits of the pieces, in evaluation mode.

    Raises:
        InputError: the forward pass fails, or returns other logits or anything else.
    """
    if getattr(model.forward, "__func__", None) is nn.Module.forward:
        return  # the model has no forward pass
    _forward_logits(model.train(), tokens, logits, " in training")
    output = _forward_logits(model.eval(), tokens, logits, "")
    # Many models return only the last position, for generation.
    difference = largest_difference(output, logits[:, -output.shape[1] :])
    if not difference < TOLERANCE:
        raise InputError(
            f"model.import: the model's own forward pass gives other logits than its pieces applied in turn (largest "
            f"relative difference {difference:.2g}); each of front, blocks and back must do all of its part itself"
        )


def _forward_logits(model: nn.Module, tokens: Tensor, logits: Tensor, when: str) -> Tensor:
    """Return the output of a model's own forward pass, after the check that its shape is that of logits of all
    positions or of the last one.

    Args:
        model: the model.
        tokens: [batch, seq].
        logits: logits of the pieces, whose shape is expected.
        when: '' or ' in training', for the message of an error.

    Raises:
        InputError: the forward pass fails, or returns something else.
    """
    batch, seq, width = logits.shape
    try:
        with torch.no_grad():
            output = model(tokens)
    except Exception as error:
        raise InputError(
            f"model.import: the model's own forward, called with tokens [{batch}, {seq}] alone{when}, raised "
            f"{describe_user_error(error)}; {_REMEDY}"
        ) from error
    checked = _alone(output)
    if checked is None or checked.shape not in (logits.shape, (batch, 1, width)):
        raise InputError(
            f"model.import: the model's own forward gives {_described(output)}{when}; expected a Tensor "
            f"[{batch}, {seq}, {width}]; {_REMEDY}"
        )
    return checked


def _alone(output: object) -> Tensor | None:
    """Return the logits of a model's output, if the output has no other field that could affect the loss; otherwise
    None.
    """
    if isinstance(output, Mapping):
        beside = [key for key, value in output.items() if value is not None and key not in ("logits", *BESIDE_LOGITS)]
        output = None if beside else output.get("logits")
    elif isinstance(output, tuple | list):
        output = output[0] if output and all(item is None for item in output[1:]) else None
    return output if isinstance(output, Tensor) else None


def _described(output: object) -> str:
    """Return a text about a model's output with the shapes of its tensors, as 'tuple (Tensor [2, 6, 11], Tensor
    [])'.
    """
    if isinstance(output, Tensor):
        return f"Tensor {list(output.shape)}"
    if isinstance(output, Mapping):
        items = [f"{key}: {_described(value)}" for key, value in output.items() if value is not None]
        return f"{type(output).__name__} ({', '.join(items)})"
    if isinstance(output, tuple | list):
        return f"{type(output).__name__} ({', '.join(map(_described, output))})"
    return "None" if output is None else type(output).__name__
