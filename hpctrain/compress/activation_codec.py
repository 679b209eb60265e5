"""Compresses stage messages: activations and their gradients.

There is no residual (decision 0078): the rounding errors of a message are lost, because the next message is about other
samples.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.compress.codecs.integers import BLOCK, IntegerCode
from hpctrain.records.plan.gradient_codec import Messages


class Bf16ActivationCodec:
    """Codec of stage messages in the format `bf16`: each number is rounded to bfloat16 (8 significant bits), half the
    bytes of fp32.
    """

    def empty(self, tensor: Tensor) -> Tensor:
        """Return an uninitialised bf16 message with the shape of a tensor, on the tensor's device."""
        return torch.empty(tensor.shape, dtype=torch.bfloat16, device=tensor.device)

    def write(self, tensor: Tensor) -> Tensor:
        """Return the message that encodes a tensor of any shape, newly allocated by `empty`."""
        return self.empty(tensor).copy_(tensor)

    def read(self, message: Tensor, tensor: Tensor) -> None:
        """Decode a message into `tensor`, which has the shape of the tensor that was encoded."""
        tensor.copy_(message)


class Int8ActivationCodec:
    """Codec of stage messages in the format `int8`: 8-bit integers with an fp32 scale for each block of 256 consecutive
    numbers. The last block is padded with zeros.

    In most models, a block is smaller than a token's activations, so a channel with large activations makes only its
    own block coarse. If a block has a number that is not finite, all its decoded numbers are NaN or infinite.
    """

    def __init__(self) -> None:
        self._code = IntegerCode(8)

    def empty(self, tensor: Tensor) -> Tensor:
        size = self._code.bytes_of(_padded_numel(tensor))
        return torch.empty(size, dtype=torch.uint8, device=tensor.device)

    def write(self, tensor: Tensor) -> Tensor:
        numbers = torch.empty(_padded_numel(tensor), device=tensor.device)
        numbers[: tensor.numel()].view(tensor.shape).copy_(tensor)
        numbers[tensor.numel() :] = 0.0
        message = self.empty(tensor)
        self._code.write(numbers, message, errors=False)
        return message

    def read(self, message: Tensor, tensor: Tensor) -> None:
        numbers = torch.empty(_padded_numel(tensor), device=tensor.device)
        self._code.read(message, numbers)
        tensor.copy_(numbers[: tensor.numel()].view(tensor.shape))


ActivationCodec = Bf16ActivationCodec | Int8ActivationCodec
"""A codec of stage messages. A message's length depends only on its tensor's shape, so the receiver knows the length.
"""


def build_activation_codec(messages: Messages) -> ActivationCodec | None:
    """Return the codec for a format of stage messages; None for the format `none`, in which tensors are sent as they
    are.
    """
    match messages:
        case "none":
            return None
        case "bf16":
            return Bf16ActivationCodec()
        case "int8":
            return Int8ActivationCodec()


def _padded_numel(tensor: Tensor) -> int:
    """Return the number of the tensor's elements, rounded up to a multiple of `BLOCK` (256)."""
    return -(-tensor.numel() // BLOCK) * BLOCK


class BoundaryCodec:
    """Encodes and decodes the messages between a stage and its previous or its next stage.

    torch's pipeline stages make a `P2POp` for each tensor to send or to receive. This class puts the encoded message in
    place of the operation's tensor.
    """

    def __init__(self, codec: ActivationCodec) -> None:
        self._codec = codec
        self._expected: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Micro-batch -> pairs of a message to be received and the tensor that the message is decoded into."""

    def encode_sends(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """Replace the tensor of each send operation by its encoded message; return the operations."""
        for operation in operations:
            operation.tensor = self._codec.write(operation.tensor.detach())
        return operations

    def receive_encoded(self, micro_batch: int, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """Replace the tensor of each receive operation by an empty message; return the operations.

        Once the messages have arrived, call `read` to decode them into the replaced tensors.
        """
        pairs = [(self._codec.empty(operation.tensor), operation.tensor.detach()) for operation in operations]
        for operation, (message, _) in zip(operations, pairs, strict=True):
            operation.tensor = message
        self._expected[micro_batch] = pairs
        return operations

    def read(self, micro_batch: int) -> None:
        """Decode a micro-batch's received messages into the tensors that `receive_encoded` replaced. Do nothing if
        there are none.
        """
        for message, tensor in self._expected.pop(micro_batch, []):
            self._codec.read(message, tensor)
