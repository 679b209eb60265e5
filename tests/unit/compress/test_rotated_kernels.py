"""The Triton kernels of rotated integers write and read the messages of the CPU implementation.

They run on a GPU where there is one, and in Triton's interpreter anywhere. The interpreter is asked for by an
environment variable before Triton is loaded, so this file runs itself once more in a process of its own.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from hpctrain.compress.codecs import rotated_integers
from hpctrain.compress.codecs.integers import BLOCK
from hpctrain.compress.codecs.rotated_integers import LEVELS, RotatedIntegerCode

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS_ON = torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)
with_kernels = pytest.mark.requires("triton") if INTERPRETED else pytest.mark.requires("triton", "cuda")
not_inside = pytest.mark.skipif(INTERPRETED, reason="the process that runs the interpreter needs no other")
BLOCKS = 10
"""More than one program of a kernel works on, and no multiple of it."""


def kernels(_: torch.device) -> ModuleType:
    from hpctrain.compress.codecs import rotated_kernels

    return rotated_kernels


def numbers() -> Tensor:
    values = torch.randn(BLOCKS, BLOCK, generator=torch.Generator().manual_seed(1))
    values *= torch.logspace(-3, 3, BLOCKS)[:, None]
    values[3] = 0.0
    return values


@with_kernels
@pytest.mark.parametrize("bits", LEVELS)
def test_messages_of_kernels_and_of_the_cpu_are_read_by_both(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = numbers()
    code = RotatedIntegerCode(bits, 5)
    plain = torch.zeros(code.bytes_of(values.numel()), dtype=torch.uint8)
    left_plain = values.flatten().clone()
    code.write(left_plain, plain)
    read_plain = torch.empty(values.numel())
    code.read(plain, read_plain)
    with monkeypatch.context() as patched:
        if INTERPRETED:
            patched.setattr(rotated_integers, "_kernels", kernels)
        on_device = RotatedIntegerCode(bits, 5)
        left = values.flatten().clone().to(KERNELS_ON)
        message = torch.zeros_like(plain, device=KERNELS_ON)
        on_device.write(left, message)
        without_errors = torch.zeros_like(message)
        on_device.write(values.flatten().to(KERNELS_ON), without_errors, errors=False)
        assert torch.equal(without_errors, message)
        read, read_other = (torch.empty(values.numel(), device=KERNELS_ON) for _ in range(2))
        on_device.read(message, read)
        on_device.read(plain.to(KERNELS_ON), read_other)
        total = torch.ones(values.numel(), device=KERNELS_ON)
        on_device.add([message, plain.to(KERNELS_ON)], total)
    norms = values.norm(dim=1)
    for name, found, wanted in (
        ("what is read and what is left", (read + left).cpu(), values.flatten()),
        ("a message of the CPU", read_other.cpu(), read_plain),
        ("added", total.cpu(), 1 + (read + read_other).cpu()),
    ):
        assert ((found - wanted).view_as(values).norm(dim=1) <= 1e-5 * norms + 1e-6).all(), name
    # The interpreter rounds a scale down to bf16, a GPU to the nearest; a number at a threshold then changes its level.
    again = torch.empty(values.numel())
    code.read(message.cpu(), again)
    assert ((again - read.cpu()).view_as(values).norm(dim=1) <= 1e-5 * norms).all(), "the CPU reads it too"
    assert ((again - read_plain).view_as(values).norm(dim=1) <= 0.2 * norms).all(), "and it is nearly its own"
    assert not read.view(BLOCKS, BLOCK)[3].any(), "zeros stay zeros"


@not_inside
@pytest.mark.requires("triton")
@pytest.mark.slow
def test_kernels_in_the_interpreter() -> None:
    argv = [sys.executable, "-m", "pytest", __file__, "-k", "messages", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "HPCTRAIN_REQUIRE": "triton"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@not_inside
@pytest.mark.requires("triton")
@pytest.mark.slow
def test_kernels_can_be_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes what the compiler does not, and the compiler needs no GPU to say so."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hpctrain.compress.codecs import rotated_kernels as module

    nvidia, amd = [GPUTarget("cuda", arch, 32) for arch in (80, 90)], GPUTarget("hip", "gfx942", 64)
    tensors = {"numbers": "*fp32", "scales": "*bf16", "payload": "*u8", "signs": "*fp32", "levels": "*fp32"}
    scalars = {"blocks": "i64", "factor": "fp32", "slope": "fp32"}
    # Each number of bits for one kind of GPU; for the others 3, with which numbers lie across two bytes.
    for target, binary, numbers in ((nvidia[0], "cubin", LEVELS), (nvidia[1], "cubin", [3]), (amd, "hsaco", [3])):
        for kernel in (module._write, module._read):
            for bits, flag in itertools.product(numbers, (False, True)):
                constants = {"bits": bits, "rows": module.ROWS, "add": flag, "errors": flag}
                signature = {name: (tensors | scalars).get(name, "constexpr") for name in kernel.arg_names}
                values = {(kernel.arg_names.index(name),): constants[name] for name in constants if name in signature}
                source = ASTSource(kernel, signature, values)
                assert triton.compile(source, target=target, options=module._OPTIONS).asm[binary]
