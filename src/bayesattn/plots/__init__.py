"""Figures of uncertainty and attention. Needs matplotlib (the `plots` extra); every function returns a `Figure`."""

from bayesattn.optional import needs_extra

with needs_extra("bayesattn.plots", "plots"):
    from bayesattn.plots.attention import plot_attention, plot_attention_heads, plot_edge_uncertainty
    from bayesattn.plots.doubt import plot_doubt, plot_image_doubt
    from bayesattn.plots.uncertainty import (
        plot_entropy,
        plot_p_values,
        plot_pavpu,
        plot_reliability,
        plot_risk_coverage,
    )

__all__ = [
    "plot_attention",
    "plot_attention_heads",
    "plot_doubt",
    "plot_edge_uncertainty",
    "plot_entropy",
    "plot_image_doubt",
    "plot_p_values",
    "plot_pavpu",
    "plot_reliability",
    "plot_risk_coverage",
]
