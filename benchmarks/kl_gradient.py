"""Noise in the gradient of the KL: the closed form against the estimate at a draw, ln q(S) − ln p(S).

    python benchmarks/kl_gradient.py docs/results

writes kl-gradient.csv and kl-gradient.png. Rows of 64 keys with random scores, BAM-WC's families, one draw per step, CPU.
"""

import sys
from pathlib import Path

import torch

from bayesattn import record_kl
from bayesattn.plots.style import COLORS, MARKERS, new_figure, plain
from bayesattn_recipes.baselines import AttentionChoice, build_weights
from bayesattn_recipes.common.folders import write_csv

SHAPES = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
NUM_DRAWS = 400
NUM_KEYS = 64


def gradients(k: float, *, sampled: bool) -> torch.Tensor:
    """Return the gradient of the KL in the scores, one row per draw."""
    torch.manual_seed(0)
    module = build_weights(AttentionChoice("BAM-WF", sampled_kl=sampled, weibull_k=k, kl_reduction="sum"))
    row = torch.randn(1, 1, NUM_KEYS, generator=torch.Generator().manual_seed(1))
    scores = row.expand(NUM_DRAWS, 1, NUM_KEYS).clone().requires_grad_()
    with record_kl() as kl:
        module(scores)
    (NUM_DRAWS * kl.total()).backward()
    assert scores.grad is not None
    return scores.grad[:, 0]


def measure() -> list[dict[str, float | str]]:
    """Return the spread of the gradient over draws, relative to its mean, for every k."""
    rows = []
    for k in SHAPES:
        exact = gradients(k, sampled=False).mean(dim=0)
        for estimate, sampled in (("closed form", False), ("at a draw", True)):
            found = gradients(k, sampled=sampled)
            spread = float(found.var(dim=0).sum().sqrt() / exact.norm())
            bias = float((found.mean(dim=0) - exact).norm() / exact.norm())
            rows.append(
                {"k": k, "estimate": estimate, "relative_deviation": spread, "relative_bias": bias, "draws": NUM_DRAWS}
            )
    return rows


def draw(rows: list[dict[str, float | str]], path: Path) -> None:
    """Plot the spread against k."""
    figure, axes = new_figure(5.8, 3.2)
    ax = axes[0, 0]
    for index, estimate in enumerate(("at a draw", "closed form")):
        inside = [row for row in rows if row["estimate"] == estimate]
        values = [row["relative_deviation"] for row in inside]
        ax.plot([row["k"] for row in inside], values, color=COLORS[index], marker=MARKERS[index], label=estimate)
    ax.set_xscale("log")
    ax.set_xlabel("k of the Weibull posterior (small: much noise)")
    ax.set_ylabel("deviation / norm of the mean")
    ax.set_title("Noise in the gradient of the KL", fontsize=10, loc="left")
    ax.legend(fontsize=8, frameon=False)
    plain(ax)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = measure()
    write_csv(folder / "kl-gradient.csv", found)
    draw(found, folder / "kl-gradient.png")
