"""Reduce-scatters that go on while a rank computes: how many are on their way, in which order they end, and what
becomes of them after an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hpctrain.compress.codecs.integers import IntegerCode
from hpctrain.compress.collectives.overlapped_work import PendingWork
from hpctrain.compress.collectives.reduce_scatter import ReduceScatter, ScatterUnderWay
from hpctrain.compress.collectives.sums_in_flight import SUMS_IN_FLIGHT, SumsInFlight
from hpctrain.compress.reducers.integer_residuals import IntegerResiduals

WORLD = 3
RESIDUALS = IntegerResiduals(IntegerCode(8), "part", feedback=True)


class Wire:
    """What goes on between ranks: messages arrive when the test says so, or when the rank waits for them."""

    def __init__(self) -> None:
        self.collectives: list[tuple[int, str]] = []
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.arrived = 0
        self.error: Exception | None = None


class FakeWork(PendingWork):
    """Sizes, then numbers; modules below 2 send no sizes."""

    def __init__(self, wire: Wire, number: int, module: int) -> None:
        self._wire, self._number, self._module = wire, number, module
        self._begun = module < 2
        wire.collectives.append((module, "numbers" if self._begun else "sizes"))

    @property
    def has_ended(self) -> bool:
        return self._begun and self._wire.arrived >= self._number

    def begin_last(self) -> None:
        if self._wire.error is not None:
            raise self._wire.error
        if not self._begun:
            self._wire.collectives.append((self._module, "numbers"))
            self._begun = True

    def wait(self) -> None:
        self.begin_last()


class FakeScatter(ReduceScatter):
    """Every rank has the gradient of this one."""

    def __init__(self, wire: Wire, number: int, keeps: bool) -> None:
        self._wire, self.number = wire, number
        self.residuals = RESIDUALS if keeps else None
        self.under_way = 0

    def begin(self, gradient: Tensor, group: Any) -> ScatterUnderWay:
        self._wire.begun.append(self.number)
        self.under_way += 1
        work = FakeWork(self._wire, len(self._wire.begun), self.number)

        def write_sums(output: Tensor) -> None:
            self._wire.ended.append(self.number)
            self.under_way -= 1
            output.copy_(WORLD * gradient.view(WORLD, -1)[0])

        return ScatterUnderWay(gradient.nbytes, work, write_sums)


def begin(sums: SumsInFlight, scatter: FakeScatter, value: float, numbers: int = 2, complete: bool = True) -> Tensor:
    output, group = torch.full((numbers,), 7.0), Any
    gradient = torch.full((WORLD * numbers,), float(value))
    sent = sums.begin(scatter, output, gradient, group, "sum", complete)  # type: ignore[arg-type]
    assert sent == gradient.nbytes
    return output


MODULES = st.integers(0, 3)
"""Numbers of modules; those with an even one keep residuals."""


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(MODULES, st.integers(0, 3)), max_size=12))
def test_sums_end_in_the_order_in_which_they_began(order: list[tuple[int, int]]) -> None:
    wire, sums = Wire(), SumsInFlight()
    scatters = [FakeScatter(wire, number, number % 2 == 0) for number in range(4)]
    gradients: dict[int, Tensor] = {}
    with sums:
        for value, (module, arrives) in enumerate(order, 1):
            output = begin(sums, scatters[module], value)
            gradient = gradients.setdefault(module, output)
            if gradient is not output:
                gradient += output  # as torch does at once
            assert len(wire.begun) - len(wire.ended) <= SUMS_IN_FLIGHT
            assert scatters[module].under_way == 1 or scatters[module].residuals is None
            wire.arrived += arrives
            sums.proceed()
            # The numbers of the last one leave only after its sizes, which nobody waits for here.
            assert len(wire.ended) >= min(wire.arrived, len(wire.begun) - (module >= 2))
    kinds = {module: ["numbers"] if module < 2 else ["sizes", "numbers"] for module in range(4)}
    in_turn = [(module, kind) for module, _ in order for kind in kinds[module]]
    assert wire.collectives == in_turn, "on every rank the same, whatever has arrived"
    assert wire.ended == wire.begun == [module for module, _ in order]
    for module, gradient in gradients.items():
        total = sum(value for value, (number, _) in enumerate(order, 1) if number == module)
        assert gradient.tolist() == [WORLD * total] * 2


def test_waiting_leaves_later_micro_batches_where_the_first_ones_are() -> None:
    wire, sums = Wire(), SumsInFlight()
    scatter = FakeScatter(wire, 0, keeps=True)
    with sums:
        gradient = begin(sums, scatter, 1.0)
        sums.wait()
        assert gradient.tolist() == [WORLD, WORLD]
        begin(sums, scatter, 2.0)
    assert gradient.tolist() == [3 * WORLD, 3 * WORLD]
    with sums:
        assert begin(sums, scatter, 5.0) is not gradient
    assert gradient.tolist() == [3 * WORLD, 3 * WORLD], "the next step has another one"


@pytest.mark.parametrize("where", ["wire", "block"])
def test_an_error_drops_what_is_on_its_way(where: str) -> None:
    wire, sums = Wire(), SumsInFlight()
    scatters = [FakeScatter(wire, number, keeps=True) for number in range(2)]

    def broken_step() -> None:
        with sums:
            for scatter in scatters:
                begin(sums, scatter, 1.0)
            if where == "block":
                raise RuntimeError("lost")
            wire.error = RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        broken_step()
    assert wire.ended == []
    wire.error, wire.arrived = None, 9
    with sums:
        output = begin(sums, scatters[0], 4.0)
    assert wire.ended == [0], "of the new step alone"
    assert output.tolist() == [4 * WORLD] * 2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=6), st.integers(0, 3))
def test_parameters_may_come_and_go(branches: list[tuple[bool, int]], module: int) -> None:
    """Two parameters of equal size, of which some micro-batches use the first alone or the second alone."""
    wire, sums = Wire(), SumsInFlight()
    scatter = FakeScatter(wire, module, module % 2 == 0)
    gradients: dict[int, Tensor] = {}
    expected = {0: 0.0, 1: 0.0}
    with sums:
        for value, (both, used) in enumerate(branches, 1):
            present = [0, 1] if both or used == 2 else [used]
            output = begin(sums, scatter, value, len(present), complete=len(present) == 2)
            for parameter, part in zip(present, output.split(1), strict=True):
                expected[parameter] += WORLD * value
                # As torch does: the first part becomes the gradient, further ones are added to it.
                if parameter in gradients:
                    gradients[parameter] += part
                else:
                    gradients[parameter] = part
            wire.arrived += used
            sums.proceed()
    assert {parameter: float(gradient) for parameter, gradient in gradients.items()} == {
        parameter: total for parameter, total in expected.items() if total
    }
