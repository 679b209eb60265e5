"""Messages about activations: as long as their shape says, and as near as their kind promises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.compress.activation_codec import build_activation_codec
from hpctrain.records.plan.gradient_codec import MESSAGES, Messages


@settings(max_examples=40, deadline=None)
@given(
    messages=st.sampled_from([messages for messages in MESSAGES if messages != "none"]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.sampled_from([1, 32, 100, 256, 257])),
    exponent=st.integers(-20, 20),
    turned=st.booleans(),
)
def test_what_is_read_is_near(messages: Messages, shape: tuple[int, int, int], exponent: int, turned: bool) -> None:
    code = build_activation_codec(messages)
    assert code is not None
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 10.0**exponent
    if turned:
        tensor = tensor.transpose(0, 1)
    before = tensor.clone()
    message, read = code.write(tensor), torch.full_like(before, 9.0)
    again = code.write(tensor)
    code.read(message, read)
    assert torch.equal(tensor, before), "what is sent is still needed"
    assert torch.equal(message, again)
    empty = code.empty(tensor)
    assert (message.shape, message.dtype) == (empty.shape, empty.dtype)
    numbers = tensor.numel() if messages == "bf16" else -(-tensor.numel() // 256) * 256
    assert message.nbytes == numbers * MESSAGES[messages].number_bytes
    if messages == "bf16":
        assert (read - tensor).abs().le(tensor.abs() * 2**-8).all()
    else:
        assert (read - tensor).abs().max() <= tensor.abs().max() / 127 / 2 * (1 + 1e-5)


@pytest.mark.parametrize("messages", [messages for messages in MESSAGES if messages != "none"])
def test_an_overflow_is_still_one_behind_the_message(messages: Messages) -> None:
    code = build_activation_codec(messages)
    assert code is not None
    tensor = torch.ones(2, 3, 256)
    tensor[1, 1, 1] = torch.inf
    read = torch.zeros_like(tensor)
    code.read(code.write(tensor), read)
    assert not read[1, 1, 1].isfinite()
    assert torch.equal(read[0], tensor[0])


def test_what_travels_as_it_is_has_no_code() -> None:
    assert build_activation_codec("none") is None
