"""Figures of the decoder's attention and its uncertainty."""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from bayesattn.plots import plot_attention
from bayesattn.plots.style import COLORS, LINES, MARKERS, legend, new_figure, plain
from bayesattn.plots.style import title as set_title
from bayesattn.prediction import seeded
from bayesattn_recipes.common.figures import write_figure
from bayesattn_recipes.common.prediction import usual_method
from bayesattn_recipes.translation.batches import make_batch
from bayesattn_recipes.translation.draws import available_methods, drawing
from bayesattn_recipes.translation.measure import REJECTED
from bayesattn_recipes.translation.model import Translator
from bayesattn_recipes.translation.tables import Cells, finished_runs
from bayesattn_recipes.translation.translate import Translation
from bayesattn_recipes.translation.vocabulary import END, Vocabulary

# signals in the rejection figure: soft attention's own entropy, MC dropout, Bayesian draws
SHOWN = (
    ("soft", "mean entropy"),
    ("soft", "dropout entropy"),
    ("soft", "dropout disagreement"),
    ("wc", "attention entropy"),
    ("wc", "attention disagreement"),
    ("wc", "attention+dropout entropy"),
    ("wc", "attention+dropout disagreement"),
)


@torch.no_grad()
def attention_samples(
    model: Translator, source: list[int], target: list[int], num_samples: int, seed: int = 0
) -> tuple[Float[Tensor, "s t n"], Float[Tensor, " n"] | None]:
    """Return the weights along one translation under M draws, and the prior Ψ of a contextual model, on the CPU for plots.

    Args:
        model: In eval mode.
        source: Tokens, end token last.
        target: Tokens, end token last.
        num_samples: M; without attention noise and dropout all draws are the same.
        seed: Seed of the draws.
    """
    device = next(model.parameters()).device
    batch = make_batch([source], [target])
    method, attention = usual_method(available_methods(model)), model.decoder.attention
    draws, prior = [], None
    with seeded(seed, [device]), drawing(model, method):
        for _ in range(num_samples):
            memory = model.encode(batch["source"].to(device), batch["source_lengths"])
            # for the weights behind a step's context, call the module once more with the same noise
            seen: list[Tensor] = []
            bias, noise = model.decoder.plan_noise(memory, len(target))
            if bias is not None:
                gates = model.decoder.input_gates(model.dropout(model.target_embedding(batch["target_in"].to(device))))
                unrolled = model.decoder.unroll(gates, *memory, bias, noise, model.decoder.plan_dropout(gates))
                draws.append(attention.planned_weights(unrolled.scores, bias)[0])
            else:
                hook = attention.bayes_weights.register_forward_hook(
                    lambda module, args, out, seen=seen: seen.append(out[1].squeeze(1))
                )
                try:
                    model.unroll(memory, batch["target_in"].to(device))
                finally:
                    hook.remove()
                draws.append(torch.cat(seen, dim=1)[0])
        if attention.weights.bayes_prior is not None:
            prior = torch.exp(attention.weights.bayes_prior(memory.values.unsqueeze(1)))[0, 0, 0].cpu()
    return torch.stack(draws).cpu(), prior


def attention_figure(
    model: Translator, vocabulary: Vocabulary, translation: Translation, *, num_samples: int = 20, seed: int = 0
) -> Figure:
    """Draw mean and deviation of the attention along one translation, and two draws."""
    numbers = {piece: number for number, piece in enumerate(vocabulary.pieces)}
    source = [*vocabulary.encode([translation.source])[0], END]
    target = [numbers[token.piece] for token in translation.tokens]
    weights, prior = attention_samples(model, source, target, num_samples, seed)
    return plot_attention(
        weights,
        prior_weights=prior,
        queries=[_word(vocabulary.pieces[token]) for token in target],
        keys=[_word(vocabulary.pieces[token]) for token in source],
        title=translation.text,
    )


def _word(piece: str) -> str:
    return piece.replace("▁", "")


def write_attention_maps(
    model: Translator,
    vocabulary: Vocabulary,
    translations: Sequence[Translation],
    folder: Path,
    *,
    num_samples: int = 20,
    seed: int = 0,
) -> Path:
    """Write `attention-1.png`, `attention-2.png`, … and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, translation in enumerate(translations, start=1):
        figure = attention_figure(model, vocabulary, translation, num_samples=num_samples, seed=seed)
        write_figure(folder / f"attention-{number}.png", figure)
    return folder


def rejection_figure(cells: Cells, *, title: str = "") -> Figure:
    """Draw BLEU of what is left against the share of sentences withheld, mean over seeds, for the signals of `SHOWN`."""
    figure, axes = new_figure(6.4, 3.8)
    ax = axes[0, 0]
    for index, (variant, signal) in enumerate(SHOWN):
        runs = finished_runs(cells).get(variant, {}).values()
        found = [cell["uncertainty"][signal]["rejection"] for cell in runs if signal in cell["uncertainty"]]
        if found:
            mean = [sum(column) / len(column) for column in zip(*found, strict=True)]
            look = {"color": COLORS[index], "marker": MARKERS[index], "linestyle": LINES[index % len(LINES)]}
            ax.plot([100 * share for share in REJECTED], mean, label=f"{variant}, {signal}", linewidth=1.6, **look)
    ax.set(xlabel="least certain sentences withheld, %", ylabel="BLEU of the rest")
    set_title(ax, title)
    plain(ax)
    legend(ax, loc="upper left")
    return figure
