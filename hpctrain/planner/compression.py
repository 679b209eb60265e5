"""What compression a plan carries: what the run file asks for, resolved."""

from __future__ import annotations

from hpctrain.records.codec import CodecSpec
from hpctrain.records.compression import AutoCompression, NoCompression
from hpctrain.records.run import Run


def codecs(run: Run) -> list[CodecSpec]:
    """The codecs that the workers of this run obey. `auto` is none: the cost model knows no compressor's time yet."""
    asked = run.compression
    return [CodecSpec(codec=NoCompression() if isinstance(asked, AutoCompression) else asked)]
