"""Compression of stage messages: encoded before they are sent, decoded when their tensor is needed."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from hpctrain.compress.activation_codec import ActivationCodec


class BoundaryCodec:
    """Encodes and decodes the messages between this stage and one neighbour.

    torch's stages send a tensor and receive into one. Here the encoded message travels in the tensor's place.
    """

    def __init__(self, codec: ActivationCodec) -> None:
        self._codec = codec
        self._expected: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """By micro-batch: the messages to be received, and the tensors that they are decoded into."""

    def encode_sends(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """Replace the tensor of each send by its encoded message; return the sends."""
        for operation in operations:
            operation.tensor = self._codec.write(operation.tensor.detach())
        return operations

    def receive_encoded(self, micro_batch: int, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """Make each receive of a micro-batch fill a message, which `read` decodes later; return the receives."""
        pairs = [(self._codec.empty(operation.tensor), operation.tensor.detach()) for operation in operations]
        for operation, (message, _) in zip(operations, pairs, strict=True):
            operation.tensor = message
        self._expected[micro_batch] = pairs
        return operations

    def read(self, micro_batch: int) -> None:
        """Decode the messages of a micro-batch, which have arrived, into their tensors. Does nothing if none was
        expected."""
        for message, tensor in self._expected.pop(micro_batch, []):
            self._codec.read(message, tensor)
