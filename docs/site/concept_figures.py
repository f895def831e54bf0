"""Draw the figures of the concept pages with the library's own functions.

python docs/site/concept_figures.py
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure

import bayesattn as ba

OUT = Path(__file__).parents[1] / "concepts" / "figures"
SHAPES = (1.0, 5.0, 30.0)
COLORS = ("#d55e00", "#0072b2", "#009e73")


def save(figure: Figure, name: str) -> None:
    """Write a small PNG."""
    OUT.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT / f"{name}.png", dpi=110, metadata={"Software": None})


def draws() -> None:
    """Show drawn weights of one query over six keys, for three amounts of noise."""
    scores = torch.tensor([[[[-0.5, 0.6, 0.0, 1.0, 2.0, -1.0]]]])
    words = ["the", "film", "was", "not", "bad", "."]
    figure = Figure(figsize=(8.4, 2.9), layout="constrained")
    for ax, shape, color in zip(figure.subplots(1, 3, sharey=True), SHAPES, COLORS, strict=True):
        config = ba.AttentionConfig("BAM-WF", weibull_k=shape)
        sampled = [ba.functional.attention_weights(scores, config=config, seed=seed)[0][0, 0, 0] for seed in range(60)]
        mean = scores.softmax(-1)[0, 0, 0]
        for weights in sampled:
            ax.plot(range(6), weights, "_", color=color, alpha=0.35, markersize=14)
        ax.plot(range(6), mean, "ko", markersize=4)
        ax.set(title=f"k = {shape:g}", xticks=range(6), xticklabels=words, ylim=(0, 1))
        ax.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("weight W")
    save(figure, "draws")


def closed_form() -> None:
    """Compare the closed form's deviation of the margin with that of 400 draws, for three amounts of noise."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = torch.nn.Sequential(encoder, torch.nn.Flatten(), torch.nn.Linear(12 * 32, 3)).eval()
    inputs = 2.0 * torch.randn(40, 12, 32)
    figure = Figure(figsize=(8.4, 3.0), layout="constrained")
    for ax, shape, color in zip(figure.subplots(1, 3), (30.0, 5.0, 1.0), COLORS[::-1], strict=True):
        config = ba.AttentionConfig("BAM-NOKL", weibull_k=shape)
        exact = ba.uncertainty(model, inputs, config=config).std
        drawn = ba.uncertainty(model, inputs, config=config, method="draws", num_samples=400).std
        top = float(torch.maximum(exact, drawn).max()) * 1.08
        ax.plot([0, top], [0, top], color="black", linewidth=0.8)
        ax.plot(exact, drawn, "o", color=color, markersize=3.5)
        ax.set(title=f"k = {shape:g}", xlabel="closed form", xlim=(0, top), ylim=(0, top))
        ax.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("400 draws")
    save(figure, "closed-form")


def schedules() -> None:
    """Show the KL weight over steps for the kinds of `KLSchedule`."""
    figure = Figure(figsize=(5.2, 2.6), layout="constrained")
    ax = figure.subplots()
    kinds = {
        'KLSchedule("sigmoid", anneal_rate=0.05)': ba.KLSchedule("sigmoid", anneal_rate=0.05),
        'KLSchedule("linear", period=100)': ba.KLSchedule("linear", period=100),
    }
    for (name, schedule), color in zip(kinds.items(), COLORS[:2], strict=True):
        ax.plot(range(151), [schedule(step) for step in range(151)], color=color, label=name)
    ax.set(xlabel="step", ylabel="KL weight λ", ylim=(0, 1.05), xlim=(0, 150))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, loc="lower right")
    save(figure, "schedules")


if __name__ == "__main__":
    draws()
    closed_form()
    schedules()
