"""Some gradients compressed, the others summed exactly."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hpctrain.compress.reducer import Reducer


class SplitReducer:
    """A compressing reducer for the chosen positions of the list of gradients, and another one for the rest.

    Its state is that of the first, by position among the chosen.
    """

    def __init__(self, chosen: Sequence[int], compressing: Reducer, exact: Reducer) -> None:
        self._chosen = chosen
        self._compressing = compressing
        self._exact = exact

    def reduce(self, gradients: list[Tensor]) -> int:
        apart = set(self._chosen)
        rest = [gradient for index, gradient in enumerate(gradients) if index not in apart]
        return self._compressing.reduce([gradients[index] for index in self._chosen]) + self._exact.reduce(rest)

    def state(self) -> dict[str, Tensor]:
        return self._compressing.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._compressing.load_state(state)

    def drop_state(self) -> None:
        self._compressing.drop_state()

    def metrics(self) -> dict[str, float]:
        return self._compressing.metrics()
