"""State that lasts from one step to the next, and is saved in checkpoints: of reducers, codecs and residuals."""

from __future__ import annotations

from torch import Tensor


class StepState:
    """An object without state, unless a subclass overrides the methods or sets `holder`."""

    holder: StepState | None = None
    """The object that holds the state; None: this object."""

    def state(self) -> dict[str, Tensor]:
        """Return this rank's state between steps, such as residuals: `kind.position` of the gradient -> tensor, not
        copied.
        """
        return {} if self.holder is None else self.holder.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned; missing entries start afresh."""
        if self.holder is not None:
            self.holder.load_state(state)

    def drop_state(self) -> None:
        """Drop all state and start afresh. Either all ranks must do so, or none."""
        if self.holder is None:
            self.load_state({})
        else:
            self.holder.drop_state()

    def metrics(self) -> dict[str, float]:
        """Return figures of the last reduction for the metrics of the step: those of `REDUCER_METRICS` that apply."""
        return {} if self.holder is None else self.holder.metrics()
