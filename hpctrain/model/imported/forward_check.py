"""Compares the model's own forward pass with that of its pieces.

Training applies the pieces in turn and computes the loss itself. Anything else that the model's own forward pass does
or returns would be lost, so a model that does more is refused before a job is queued.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hpctrain.base.errors import InputError
from hpctrain.model.imported.split_check import TOLERANCE, largest_difference
from hpctrain.model.imported.user_error import describe_user_error

BESIDE_LOGITS = ("past_key_values", "hidden_states", "attentions", "cross_attentions")
"""Fields of transformers' model outputs, besides the logits, that do not affect the loss."""

_REMEDY = (
    "training calls front, blocks and back in turn, and its loss is cross-entropy with the next token: give the logits "
    "alone, or leave forward out"
)


def check_forward(model: nn.Module, tokens: Tensor, logits: Tensor) -> None:
    """Check that the model's own forward pass, if it has one, returns the logits of its pieces and nothing else.

    Args:
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
    """Return the output of the model's own forward pass, checked to be the logits of all positions or of the last
    one.
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
    """Return the logits of an output that has no other relevant fields; None for any other output."""
    if isinstance(output, Mapping):
        beside = [key for key, value in output.items() if value is not None and key not in ("logits", *BESIDE_LOGITS)]
        output = None if beside else output.get("logits")
    elif isinstance(output, tuple | list):
        output = output[0] if output and all(item is None for item in output[1:]) else None
    return output if isinstance(output, Tensor) else None


def _described(output: object) -> str:
    """Return a text about an output with the shapes of its tensors, as 'tuple (Tensor [2, 6, 11], Tensor [])'."""
    if isinstance(output, Tensor):
        return f"Tensor {list(output.shape)}"
    if isinstance(output, Mapping):
        items = [f"{key}: {_described(value)}" for key, value in output.items() if value is not None]
        return f"{type(output).__name__} ({', '.join(items)})"
    if isinstance(output, tuple | list):
        return f"{type(output).__name__} ({', '.join(map(_described, output))})"
    return "None" if output is None else type(output).__name__
