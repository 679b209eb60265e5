"""How messages between pipeline stages are encoded, and the units in which codecs of messages and gradients count."""

from __future__ import annotations

from typing import Literal, NamedTuple

FULL_BYTES = 4
"""Bytes of a number in fp32, the type of gradients."""
SCALE_BYTES = 4 / 256
"""Bytes that the scale of its block adds to each number that is sent as an integer."""
CodecRate = Literal["bf16", "quantized", "topk", "power_sgd"]
"""What a probe measures of codecs on a device: a field of `codec_s` in topology.json."""
Messages = Literal["none", "bf16", "int8"]
"""Encoding of a message between two pipeline stages."""


class MessageEncoding(NamedTuple):
    """What an encoding sends and costs."""

    number_bytes: float
    """Bytes sent for a number of an activation, or of its gradient."""
    measured_as: CodecRate | None = None
    """The measurement that has its processor seconds; None: it costs nothing."""
    lossy: bool = False
    """Whether mode auto takes it only with `lossy`."""


MESSAGES: dict[Messages, MessageEncoding] = {
    "none": MessageEncoding(FULL_BYTES),
    "bf16": MessageEncoding(2, "bf16"),
    "int8": MessageEncoding(1 + SCALE_BYTES, "quantized", lossy=True),
}
"""The encodings, the most exact first."""
