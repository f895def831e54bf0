"""The picture of the README: sentences with their doubtful words shaded, and the errors that remain at every coverage.

    python -m bayesattn_recipes.doubt.picture --found DIR --data DIR --out PNG

`DIR` of `--found` holds the answers of the study's models (`reproduce.py`).

Left: sentences of SST-2's test split and the answers of seed 0:

* of the answers whose own probability is at least `SURE`, the `NUM_EACH` wrong and the `NUM_EACH` right ones with the
  lowest t = margin / std;
* for each class, the answer with the highest t.

The rule uses the labels, as many wrong as right, because so few answers cannot show how often a low t means an error. Four
chosen by t alone hold three errors at 0.9 and none at 0.8, 0.85 or 0.95. The curves show how often, over all models.

A word's shade is its share of the variance, the sum over its tokens. Special tokens have a share too but no word.

Right: the error rate of the answers that are kept when the least certain are withheld, the mean over all models (tasks ×
seeds). The change of the area is that of `table.py`.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator
from torch import Tensor

from bayesattn import metrics
from bayesattn.plots import style
from bayesattn.plots.doubt import shade_words
from bayesattn_recipes.common.figures import write_figure
from bayesattn_recipes.doubt.rankings import BASELINE, FLAGSHIP, RANKINGS, Found, Run
from bayesattn_recipes.doubt.reproduce import TASKS, read_found
from bayesattn_recipes.doubt.table import pool
from bayesattn_recipes.language import data as text_data
from bayesattn_recipes.language.train import load_config, prepare_run

TASK = "sst2"
SURE, NUM_EACH = 0.9, 2
COLUMNS, SIZE = 64, 11
COVERAGES = np.linspace(0.05, 1.0, 96)


@dataclass(frozen=True)
class Sentence:
    """One sentence and the model's answer.

    Attributes:
        words: The words, as in the file.
        shares: Shares of the variance, one per word.
        answer: The class the model predicts.
        probability: Probability of this class.
        t: Margin over its standard deviation.
        correct: Whether the answer is right.
    """

    words: list[str]
    shares: Float[np.ndarray, " n"]
    answer: str
    probability: float
    t: float
    correct: bool


@dataclass(frozen=True)
class Chosen:
    """The sentences of the picture.

    Attributes:
        doubtful: The most doubtful of the sure answers, wrong and right.
        certain: The least doubtful answer of every class.
    """

    doubtful: list[Sentence]
    certain: list[Sentence]


def choose_answers(
    probabilities: Float[Tensor, "n c"],
    t: Float[Tensor, " n"],
    correct: Bool[Tensor, " n"],
    *,
    sure: float = SURE,
    num_each: int = NUM_EACH,
) -> tuple[list[int], list[int]]:
    """Return the most doubtful of the sure answers, wrong ones first, and the least doubtful answer of every class."""
    confidence, answers = probabilities.max(dim=1)
    order = [i for i in t.argsort(stable=True).tolist() if confidence[i] >= sure]
    doubtful = [i for right in (False, True) for i in [i for i in order if bool(correct[i]) == right][:num_each]]
    certain = [
        max((answers == c).nonzero().flatten().tolist(), key=lambda i: float(t[i]))
        for c in reversed(range(probabilities.shape[1]))
        if bool((answers == c).any())
    ]
    return doubtful, certain


def share_of_words(word_of: Sequence[int | None], shares: Float[Tensor, " n"]) -> Float[np.ndarray, " w"]:
    """Return the sum of the tokens' shares by word; tokens of no word are left out."""
    total = np.zeros(1 + max(word for word in word_of if word is not None))
    for word, share in zip(word_of, shares.tolist(), strict=True):
        if word is not None:
            total[word] += share
    return total


def read_sentences(found: Found, data: Path) -> Chosen:
    """Return the sentences that the rule chooses."""
    config = load_config(TASK, ["attention.variant=soft"])
    prepared = prepare_run(config, data)
    source = text_data.load(TASK, data, config.source)
    run = Run(found, [found])
    probabilities, t = torch.softmax(run.get("test", "logits"), dim=1), RANKINGS[FLAGSHIP](run, "test")

    def sentence(row: int) -> Sentence:
        words = source.splits["test"][row].texts[0].split()
        tokens = prepared.tokenizer(words, is_split_into_words=True, truncation=True, max_length=config.max_length)
        if tokens["input_ids"] != prepared.splits["test"].rows[row]["input_ids"]:
            raise ValueError(
                f"the tokens of test text {row} of {TASK} do not match its words {words}. Use the study's data folder"
            )
        word_of = tokens.word_ids(0)
        return Sentence(
            words, share_of_words(word_of, run.get("test", "tokens")[row, : len(word_of)].float()),
            source.class_names[int(probabilities[row].argmax())], float(probabilities[row].max()), float(t[row]),
            bool(run.correct("test")[row]),
        )  # fmt: skip

    doubtful, certain = choose_answers(probabilities, t, run.correct("test"))
    return Chosen([sentence(row) for row in doubtful], [sentence(row) for row in certain])


def draw(chosen: Chosen, found: Mapping[str, Sequence[Found]]) -> Figure:
    """Draw sentences and curves."""
    figure, axes = style.new_figure(9.72, 4.7, columns=2, width_ratios=(1.75, 1.0))
    _draw_sentences(axes[0, 0], chosen)
    _draw_curves(axes[0, 1], found)
    return figure


def _draw_sentences(ax: Axes, chosen: Chosen) -> None:
    ax.axis("off")
    ax.set_title("Film reviews; shade: a word's share of the doubt", fontsize=SIZE, fontweight="bold", loc="left")
    sure = f"Sure ({SURE:.0%} or more) with the lowest t: {NUM_EACH} wrong and {NUM_EACH} right answers"
    parts = {sure: chosen.doubtful, "Highest t of each class": chosen.certain}
    line = 0.0
    for heading, sentences in parts.items():
        ax.text(0, line, heading, fontsize=SIZE - 1, style="italic", color=style.NEUTRAL, va="center")
        line += 1.3
        for sentence in sentences:
            line += 1.15 * shade_words(
                ax, sentence.words, sentence.shares, top=line, columns=COLUMNS, size=SIZE - 1, spacing=1.15
            )
            mark, verdict, color = ("✓", "right", style.GOOD) if sentence.correct else ("✗", "wrong", style.BAD)
            said = f"{mark} {sentence.answer} {sentence.probability:.0%}, {verdict}, t = {sentence.t:,.0f}"
            ax.text(0, line, said, fontsize=SIZE - 1, fontweight="bold", color=color, va="center")
            line += 1.5
        line += 0.4
    ax.set(xlim=(0, COLUMNS), ylim=(line - 1.4, -0.7))


def _draw_curves(ax: Axes, found: Mapping[str, Sequence[Found]]) -> None:
    curves, rows = {BASELINE: [], FLAGSHIP: []}, []
    for task, models in found.items():
        for seed, model in enumerate(models):
            run = Run(model, [model])
            for name, values in curves.items():
                certainty, correct = RANKINGS[name](run, "test").double(), run.correct("test")
                curve = metrics.risk_coverage(certainty, correct)
                values.append(np.interp(COVERAGES, curve.coverage.numpy(), curve.risk.numpy()))
                rows.append({"task": task, "seed": seed, "row": name, "aurc": float(curve.risk.mean())})
    (pooled,) = pool(rows)
    for name, color, line in ((BASELINE, style.NEUTRAL, "--"), (FLAGSHIP, style.BAD, "-")):
        ax.plot(100 * COVERAGES, 100 * np.mean(curves[name], axis=0), line, color=color, linewidth=2.4, label=name)
    ax.set(xlim=(0, 100), ylim=(0, None))
    ax.yaxis.set_major_locator(MultipleLocator(5))
    ax.set_xlabel("answers kept, %", fontsize=SIZE)
    ax.set_ylabel("errors among them, %", fontsize=SIZE)
    ax.tick_params(labelsize=SIZE - 1)
    ax.legend(fontsize=SIZE, frameon=False, loc="upper left")
    said = f"area {100 * pooled.change:+.0f} %\n({100 * pooled.low:+.0f} to {100 * pooled.high:+.0f})".replace("-", "−")
    ax.text(0.97, 0.06, said, transform=ax.transAxes, fontsize=SIZE, ha="right", color=style.BAD)
    ax.set_title(f"{len(found)} tasks, {pooled.num_runs} fine-tuned models", fontsize=SIZE, fontweight="bold")
    style.plain(ax)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the picture from the command line."""
    parser = argparse.ArgumentParser(description="Draw the picture of the README from the study's answers.")
    parser.add_argument("--found", type=Path, required=True, help="folder of the answers, one safetensors file per model")
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--out", type=Path, required=True, help="PNG file to write")
    parser.add_argument("--num-seeds", type=int, default=5, help="models per task")
    given = parser.parse_args(arguments)
    found = {
        task: [read_found(given.found / f"{task}-{seed}.safetensors") for seed in range(given.num_seeds)] for task in TASKS
    }
    write_figure(given.out, draw(read_sentences(found[TASK][0], given.data), found))


if __name__ == "__main__":
    main()
