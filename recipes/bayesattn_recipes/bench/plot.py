"""One bar per provider: its time as a multiple of the baseline's, for every case and mode."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from bayesattn.plots.style import COLORS
from bayesattn_recipes.bench.harness import Row

# ticks of logarithmic axes, which would otherwise show powers of ten
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


def plot_ratios(rows: Sequence[Row]) -> Figure:
    """Draw the ratios, a panel for every mode, grouped by case; on a logarithmic axis where they spread."""
    modes = list(dict.fromkeys(row.mode for row in rows))
    figure = Figure(figsize=(8.0, 0.3 * len(rows) + 0.9 * len(modes)), layout="constrained")
    heights = [sum(row.mode == mode for row in rows) for mode in modes]
    axes = figure.subplots(len(modes), 1, squeeze=False, height_ratios=heights)[:, 0]
    providers = list(dict.fromkeys(row.provider for row in rows))
    for ax, mode in zip(axes, modes, strict=True):
        shown = [row for row in rows if row.mode == mode]
        colors = [COLORS[providers.index(row.provider) % len(COLORS)] for row in shown]
        ax.barh(range(len(shown)), [row.ratio for row in shown], color=colors)
        ax.set_yticks(range(len(shown)), [f"{row.case}  {row.provider}" for row in shown], fontsize=8)
        for position, row in enumerate(shown):
            # right of the line at 1, which would otherwise cross the number of a shorter bar
            ax.text(max(row.ratio, 1.0), position, f" {row.ratio:.2f}", va="center", fontsize=8)
        ax.invert_yaxis()
        if max(row.ratio for row in shown) > 3.0:
            ax.set_xscale("log")
            low, high = ax.get_xlim()
            ticks = [tick for tick in TICKS if low <= tick <= high]
            ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            ax.minorticks_off()
        ax.axvline(1.0, color="black", linewidth=0.8)
        ax.set_title(f"{mode}: times the first provider of each case, {shown[0].device}", fontsize=9, loc="left")
        ax.spines[["top", "right"]].set_visible(False)
    return figure
