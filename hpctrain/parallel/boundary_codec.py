"""Messages with a neighbouring stage in fewer bytes: written before they are sent, read when they are needed."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from hpctrain.compress.activation_codec import ActivationCodec


class BoundaryCodec:
    """Writes what is sent to the stage before or behind, and reads what comes from there.

    torch's stages send a tensor and receive into one. Here another tensor, the message, travels in its place.
    """

    def __init__(self, codec: ActivationCodec) -> None:
        self._codec = codec
        self._expected: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """By micro-batch: the messages on their way and the tensors that they are about."""

    def encode_sends(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """The sends, each with a message in place of its tensor."""
        for operation in operations:
            operation.tensor = self._codec.write(operation.tensor.detach())
        return operations

    def receive_encoded(self, micro_batch: int, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """The receives of a micro-batch, each into a message in place of its tensor, which `read` writes."""
        pairs = [(self._codec.empty(operation.tensor), operation.tensor.detach()) for operation in operations]
        for operation, (message, _) in zip(operations, pairs, strict=True):
            operation.tensor = message
        self._expected[micro_batch] = pairs
        return operations

    def read(self, micro_batch: int) -> None:
        """Write what a micro-batch's messages say, which have arrived, into the tensors that they are about; nothing
        where none was expected."""
        for message, tensor in self._expected.pop(micro_batch, []):
            self._codec.read(message, tensor)
