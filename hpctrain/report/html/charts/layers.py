"""The figure of layers: how well their gradients can be compressed."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.records.history.layer_figures import KEPT_DENSITY, LayerFigures
from hpctrain.report.html.charts.chart import HeatMap


def layer_heat_map(layers: Sequence[LayerFigures]) -> HeatMap | None:
    """Return the heat map of the shares that compression depends on, by layer; None where none was measured."""
    series = {
        "numbers with 90 % of the norm": [layer.gradient_density for layer in layers],
        f"norm of the largest {KEPT_DENSITY:.0%}".replace("%", " %"): [layer.energy_kept for layer in layers],
    }
    measured = {name: list(values) for name, values in series.items() if any(value is not None for value in values)}
    if not measured:
        return None
    note = (
        "First row: smallest share of a layer's numbers with 90 % of the squared norm of its gradient. Second row: "
        "share of the norm that arrives if only the largest numbers are sent and the others are added later."
    )
    return HeatMap(
        "layers", "Gradients by layer (share)", note, x_title="layer", y_title="",
        columns=[layer.layer for layer in layers], rows=list(measured), cells=list(measured.values()), unit="%",
        height=170 + 30 * len(measured),
    )  # fmt: skip
