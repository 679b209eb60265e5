"""What is carried from one step to the next: the state of reducers, codecs and residuals in a checkpoint."""

from __future__ import annotations

from torch import Tensor


class StepState:
    """Has no state, unless a class overrides the methods or names what holds its state."""

    holder: StepState | None = None
    """What holds the state, if it is not this object."""

    def state(self) -> dict[str, Tensor]:
        """This rank's state between steps, such as residuals: `kind.position` of the gradient -> tensor, not copied."""
        return {} if self.holder is None else self.holder.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned; whatever is missing starts afresh."""
        if self.holder is not None:
            self.holder.load_state(state)

    def drop_state(self) -> None:
        """Drop all state and start afresh. All ranks must do so, or none."""
        if self.holder is None:
            self.load_state({})
        else:
            self.holder.drop_state()

    def metrics(self) -> dict[str, float]:
        """Figures of the last reduction for the metrics of the step: those of `REDUCER_METRICS` that it has."""
        return {} if self.holder is None else self.holder.metrics()
