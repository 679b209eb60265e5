"""Compression of stage messages: encodes a message before it is sent, and decodes it when the stage needs the
tensor.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from hpctrain.compress.activation_codec import ActivationCodec


class BoundaryCodec:
    """Encodes and decodes the messages between this stage and one neighbour.

    torch's stages send a tensor and receive into one. The codec puts the encoded message in place of that tensor.
    """

    def __init__(self, codec: ActivationCodec) -> None:
        self._codec = codec
        self._expected: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Micro-batch -> pairs of a message to be received and the tensor that it is decoded into."""

    def encode_sends(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """Replace the tensor of each send by its encoded message; return the sends."""
        for operation in operations:
            operation.tensor = self._codec.write(operation.tensor.detach())
        return operations

    def receive_encoded(self, micro_batch: int, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """Replace the tensor of each receive by a message, which `read` decodes later; return the receives."""
        pairs = [(self._codec.empty(operation.tensor), operation.tensor.detach()) for operation in operations]
        for operation, (message, _) in zip(operations, pairs, strict=True):
            operation.tensor = message
        self._expected[micro_batch] = pairs
        return operations

    def read(self, micro_batch: int) -> None:
        """Decode the received messages of a micro-batch into their tensors. Do nothing if no message was expected."""
        for message, tensor in self._expected.pop(micro_batch, []):
            self._codec.read(message, tensor)
