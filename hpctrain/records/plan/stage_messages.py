"""The encodings of messages between pipeline stages, and the sizes that all codecs count with."""

from __future__ import annotations

from typing import Literal, NamedTuple

FULL_BYTES = 4
"""Bytes of a number in fp32, the type of gradients."""
SCALE_BYTES = 4 / 256
"""Bytes that each number sent as an integer takes in addition, for the fp32 scale of its block of 256."""
CodecRate = Literal["bf16", "quantized", "topk", "power_sgd"]
"""A field of `codec_s` in topology.json: seconds that a probe measured for a codec on a device."""
Messages = Literal["none", "bf16", "int8"]
"""Encoding of a message between two pipeline stages."""


class MessageEncoding(NamedTuple):
    """Bytes, processor time and lossiness of one encoding."""

    number_bytes: float
    """Bytes sent for a number of an activation, or of its gradient."""
    measured_as: CodecRate | None = None
    """Field of `codec_s` in topology.json with the encoding's processor seconds; None: encoding takes no time."""
    lossy: bool = False
    """Whether mode auto chooses the encoding only with `lossy`."""


MESSAGES: dict[Messages, MessageEncoding] = {
    "none": MessageEncoding(FULL_BYTES),
    "bf16": MessageEncoding(2, "bf16"),
    "int8": MessageEncoding(1 + SCALE_BYTES, "quantized", lossy=True),
}
"""Name -> encoding, the most exact first."""
