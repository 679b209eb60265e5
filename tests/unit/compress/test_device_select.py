"""On a GPU the same numbers are found as on a CPU: by torch's operations, and by kernels of ours.

The kernels run on a GPU where there is one, and in Triton's interpreter anywhere. The interpreter is asked for by an
environment variable before Triton is loaded, so this file runs itself once more in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hpctrain.compress.select import selectors
from hpctrain.compress.select.selectors import ThresholdSelect, by_torch, select, select_with_values, threshold_select
from hpctrain.records.plan.compression import Selector

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS_ON = torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)
with_kernels = pytest.mark.requires("triton") if INTERPRETED else pytest.mark.requires("triton", "cuda")
not_inside = pytest.mark.skipif(INTERPRETED, reason="the process that runs the interpreter needs no other")
TILE = 4096
"""Of the kernels, so that sizes lie around it."""
OTHERS: list[Selector] = ["exact", "block", "random"]


def kernels() -> ThresholdSelect:
    from hpctrain.compress.select import select_kernels

    assert select_kernels.TILE == TILE
    return select_kernels.at_least


@pytest.fixture(scope="module", params=["torch", pytest.param("kernels", marks=with_kernels)])
def way(request: pytest.FixtureRequest) -> tuple[ThresholdSelect, torch.device]:
    """Each way of finding numbers, and where it works."""
    return (by_torch, torch.device("cpu")) if request.param == "torch" else (kernels(), KERNELS_ON)


def check(way: tuple[ThresholdSelect, torch.device], values: Tensor, threshold: float) -> None:
    find, device = way
    positions, numbers = find(values.to(device), torch.tensor(threshold, device=device))
    with np.errstate(invalid="ignore"):
        wanted = np.flatnonzero(np.abs(values.numpy()) >= np.float32(threshold))
    assert positions.dtype == torch.int64
    assert positions.tolist() == wanted.tolist()
    assert numbers.tolist() == values.numpy()[wanted].tolist()


@pytest.mark.parametrize("threshold", [1e-30, 2.5, 1e30])
def test_what_reaches_a_threshold_is_found_in_order(
    way: tuple[ThresholdSelect, torch.device], threshold: float
) -> None:
    for n in (0, 1, TILE - 1, TILE, TILE + 1, 5 * TILE + 17):
        check(way, torch.randn(n, generator=torch.Generator().manual_seed(n)), threshold)


def test_tiles_with_nothing_between_two_with_much(way: tuple[ThresholdSelect, torch.device]) -> None:
    for last in (TILE - 1, TILE, 3 * TILE):
        values = torch.zeros(4 * TILE)
        values[:7] = -3.0
        values[last:] = 3.0
        check(way, values, 3.0)


def test_zeros_and_what_is_not_a_number_are_passed_over(way: tuple[ThresholdSelect, torch.device]) -> None:
    values = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-42, -2e-38, 1.0]).repeat(TILE)
    check(way, values, torch.finfo(torch.float32).tiny)
    check(way, values, torch.inf)
    check(way, values, torch.nan)


@settings(max_examples=25)
@given(st.lists(st.floats(width=32), max_size=40), st.integers(0, 2 * TILE), st.floats(2.0**-126, 2.0**100, width=32))
def test_any_numbers_anywhere(
    way: tuple[ThresholdSelect, torch.device], numbers: list[float], at: int, threshold: float
) -> None:
    check(way, torch.cat([torch.zeros(at), torch.tensor(numbers)]), threshold)


@with_kernels
@pytest.mark.parametrize("heavy", [False, True])
def test_kernels_select_what_a_cpu_selects(heavy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (16_384, 100_003):
        values = torch.randn(n, generator=torch.Generator().manual_seed(n)) * 1e-5
        if heavy:
            values = values.pow(5) * 1e20
            values[: n // 2] = 0.0
        for share in (0.0005, 0.07, 0.6, 1.0):
            same(values, int(share * n), "sampled", monkeypatch)


@with_kernels
def test_kernels_change_nothing_for_the_other_selectors(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    for how in OTHERS:
        same(values, 1500, how, monkeypatch)


def same(values: Tensor, k: int, how: Selector, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = select(values, k, how, seed=3)
    with monkeypatch.context() as patched:
        if INTERPRETED:
            patched.setattr(selectors, "_at_least", kernels())
        positions, numbers = select_with_values(values.to(KERNELS_ON), k, how, seed=3)
    assert positions.cpu().tolist() == wanted.tolist()
    assert numbers.cpu().tolist() == values[wanted].tolist()


@with_kernels
@pytest.mark.skipif(INTERPRETED, reason="half a million programs take the interpreter minutes")
def test_positions_beyond_32_bits() -> None:
    n = 2**31 + TILE + 5
    if torch.cuda.mem_get_info(KERNELS_ON)[0] < 12e9:
        pytest.skip("the GPU has less than 12 GB free")
    values = torch.zeros(n, device=KERNELS_ON)
    places = torch.tensor([3, 2**31 - 1, 2**31, n - 1], device=KERNELS_ON)
    values[places] = torch.tensor([1.0, -2.0, 3.0, -4.0], device=KERNELS_ON)
    positions, numbers = kernels()(values, torch.ones((), device=KERNELS_ON))
    assert positions.tolist() == places.tolist()
    assert numbers.tolist() == [1.0, -2.0, 3.0, -4.0]


@not_inside
@pytest.mark.requires("triton")
@pytest.mark.slow
def test_kernels_in_the_interpreter() -> None:
    argv = [sys.executable, "-m", "pytest", __file__, "-k", "kernels", "-p", "no:cacheprovider"]
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

    from hpctrain.compress.select import select_kernels

    nvidia, amd = [GPUTarget("cuda", arch, 32) for arch in (80, 90)], GPUTarget("hip", "gfx942", 64)
    for target, binary in ((nvidia[0], "cubin"), (nvidia[1], "cubin"), (amd, "hsaco")):
        for kernel, arguments in (
            (select_kernels._count, ["*fp32", "*fp32", "*i32", "i64"]),
            (select_kernels._write, ["*fp32", "*fp32", "*i64", "*i64", "*fp32", "i64"]),
        ):
            signature = dict(zip(kernel.arg_names, [*arguments, "constexpr"], strict=True))
            source = ASTSource(kernel, signature, {(len(arguments),): TILE})
            assert triton.compile(source, target=target, options=select_kernels._OPTIONS).asm[binary]


@not_inside
def test_without_a_triton_that_works_torch_finds_the_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = torch.device("cuda", 97)
    assert threshold_select(torch.device("cpu")) is by_torch
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert threshold_select.__wrapped__(nowhere) is by_torch
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    assert threshold_select.__wrapped__(nowhere) is by_torch
    said = capsys.readouterr().err
    assert said.startswith("hpctrain: Triton does not work on cuda:97 (")
    assert said.count("\n") == 1


@not_inside
def test_a_cpu_does_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr("hpctrain.compress.select.selectors.threshold_select", None)
    assert select(torch.randn(20_000), 1000).numel() > 0
