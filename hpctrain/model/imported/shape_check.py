"""Runs an imported model piece by piece and checks that each output fits the next piece."""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.base.errors import InputError
from hpctrain.model.imported.pieces import Pieces
from hpctrain.model.imported.user_error import describe_user_error


def hidden_state(pieces: Pieces, tokens: Tensor) -> Tensor:
    """Return the hidden state [batch, seq, dim] of tokens [batch, seq], computed by the front modules.

    Raises:
        InputError: the modules cannot be applied in turn, or return something else.
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

    Raises:
        InputError: the modules cannot be applied in turn, or return something else.
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
    """Check that a pass in training mode works and changes no buffer.

    Its tensors must have the shapes of the pass in evaluation mode. Buffers must not change, because checkpoints hold
    only parameters.

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
