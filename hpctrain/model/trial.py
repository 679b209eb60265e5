"""A person's model run piece by piece on one sequence: what comes out must fit what comes next."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpctrain.base.errors import InputError
from hpctrain.model.factory import last_words
from hpctrain.model.pieces import Pieces
from hpctrain.model.split_check import TOLERANCE, largest_difference


def hidden_state(pieces: Pieces, tokens: Tensor) -> Tensor:
    """The hidden state [batch, seq, dim] of tokens [batch, seq], from the front modules.

    Raises:
        InputError: they cannot be applied in turn, or give something else.
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
    """Logits [batch, seq, vocabulary] of a hidden state, through all blocks and the back modules.

    Raises:
        InputError: they cannot be applied in turn, or give something else.
    """
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
    if x.dim() != 3 or x.shape[:2] != hidden.shape[:2] or x.shape[2] < tokens:
        raise InputError(
            f"model.back: {', '.join(pieces.back)} gave a tensor of shape {tuple(x.shape)}; expected logits "
            f"[{hidden.shape[0]}, {hidden.shape[1]}, {tokens} or more]"
        )
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


def check_forward(model: nn.Module, tokens: Tensor, logits: Tensor) -> None:
    """Where the model's own forward pass gives logits, they are those of its pieces applied in turn.

    Raises:
        InputError: they are not.
    """
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
