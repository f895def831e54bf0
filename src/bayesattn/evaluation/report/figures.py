"""The figures of a report, each drawn twice: for light and for dark pages."""

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from torch import Tensor

from bayesattn import metrics, plots
from bayesattn.evaluation.measure import IN_DISTRIBUTION, mean_logits
from bayesattn.evaluation.report.examples import certain_mistakes, right_answer
from bayesattn.evaluation.report.gather import Group
from bayesattn.evaluation.report.names import method_name

COMPARISON = "Comparison"
THRESHOLDS = (1e-3, 3e-3, 0.01, 0.03, 0.05, 0.1, 0.2, 0.5)
# enough for the width of a band in a picture
NUM_RESAMPLES = 200
NUM_NEIGHBORHOODS = 3
NUM_DOUBTFUL = 3
# in the name of a class beside a node
MOST_LETTERS = 20

_PAPER, _INK, _GRID = "#11151a", "#e6edf3", "#38424d"
# fixed ids make equal figures equal bytes
_COMMON: dict[Any, Any] = {"svg.hashsalt": "bayesattn"}
_DARK: dict[Any, Any] = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), _PAPER),
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color"), _INK
    ),
}


@dataclass(frozen=True)
class Drawn:
    """A figure as data URIs for the page, and as the content of a PNG file.

    Attributes:
        section: Figures of one section are shown together.
        name: Name of the PNG file.
        caption: Text below the figure, and what screen readers read in its place.
        light: For a light page.
        dark: For a dark page.
        png: The light one as a file.
        is_wide: Whether it needs the whole width of the page.
    """

    section: str
    name: str
    caption: str
    light: str
    dark: str
    png: bytes
    is_wide: bool = False


def draw_all(groups: Sequence[Group]) -> list[Drawn]:
    """Draw what the runs have data for, on the test split; models of different recipes are not compared.

    Curves of risk against coverage are means over the runs of a group. In the other figures its runs are pooled: their
    predictions are drawn as if they came from one long test set.
    """
    split = IN_DISTRIBUTION
    groups = [
        group for group in groups if split in group.splits() and group.runs[0].predictions.splits[split].labels is not None
    ]
    sampled = [group for group in groups if group.num_samples > 1]
    by_recipe: dict[str, list[Group]] = {}
    for group in groups:
        by_recipe.setdefault(group.recipe, []).append(group)
    drawn: list[Drawn] = []
    for recipe, members in by_recipe.items():
        drawn += _comparisons(members, split, recipe if len(by_recipe) > 1 else "")
    for number, group in enumerate(sampled, start=1):
        drawn += _of_group(group, split, number)
    return [*drawn, *doubtful_answers(groups, split)]


def doubtful_answers(groups: Sequence[Group], split: str) -> Iterator[Drawn]:
    """Draw the most doubtful answers in closed form; no draws are involved, so do it once per model."""
    models: dict[Path, Group] = {}
    for group in groups:
        models.setdefault(group.runs[0].folder, group)
    for number, group in enumerate(models.values(), start=1):
        yield from _doubtful(group, split, number)


def _comparisons(groups: Sequence[Group], split: str, recipe: str) -> Iterator[Drawn]:
    """Draw the comparisons of one recipe's models; `recipe` is its name where there are several, else empty."""
    section, ending = (f"{COMPARISON}: {recipe}", f"-{recipe}") if recipe else (COMPARISON, "")
    sampled = [group for group in groups if group.num_samples > 1]
    tables = {group.label: group.tables(split) for group in groups}
    curves = {label: [(table.confidence, table.accuracy) for table in found] for label, found in tables.items()}
    caption = (
        "Error of the answered predictions against the share that is answered, by confidence, mean over runs; "
        f"split {split}."
    )
    yield draw(section, f"risk-coverage{ending}", caption, lambda: plots.plot_risk_coverage(curves))
    if not sampled:
        return
    by_threshold, by_draws = {}, {}
    for group in sampled:
        samples, accuracy = group.pooled_samples(split), torch.cat([table.accuracy for table in tables[group.label]])
        predictions = group.runs[0].predictions
        options = {"task": predictions.task, "test": predictions.test, "num_resamples": NUM_RESAMPLES}
        by_threshold[group.label] = metrics.pavpu_by_threshold(samples, accuracy, THRESHOLDS, **options)
        counts = [count for count in (2, 3, 5, 10, 20, 50, 100) if count < group.num_samples] + [group.num_samples]
        by_draws[group.label] = metrics.pavpu_by_num_samples(samples, accuracy, counts, **options)
    caption = f"PAvPU against the threshold on the p-value, with 95 % bootstrap bands; split {split}."
    yield draw(section, f"pavpu-threshold{ending}", caption, lambda: plots.plot_pavpu(by_threshold))
    caption = f"PAvPU at threshold 0.05 against the number of draws, on which it depends; split {split}."
    yield draw(section, f"pavpu-draws{ending}", caption, lambda: plots.plot_pavpu(by_draws, over="num_samples"))


def _of_group(group: Group, split: str, number: int) -> Iterator[Drawn]:
    """Draw one model: p-values, entropies, reliability before and after scaling, attention of its mistakes."""
    table, label = group.pooled_table(split), group.label
    assert table.p_value is not None
    make = partial(plots.plot_p_values, table.p_value, table.accuracy, title=label)
    yield draw(label, f"p-values-{number}", f"{label}: p-values of right and wrong answers, split {split}.", make)
    outside = [name for name in group.splits() if group.runs[0].predictions.splits[name].labels is None]
    for index, name in enumerate(outside, start=1):
        task = group.runs[0].predictions.task
        entropy = metrics.entropy(group.pooled_samples(name).double().mean(dim=0), task=task)
        make = partial(plots.plot_entropy, table.entropy, entropy, title=label)
        caption = f"{label}: entropy of the predictions on {split} and on {name}."
        yield draw(label, f"entropy-{number}-{index}", caption, make)
    make = partial(plots.plot_reliability, table.confidence, table.accuracy, title=label)
    yield draw(label, f"reliability-{number}", f"{label}: accuracy against confidence, split {split}.", make)
    scaled = _scaled_confidence(group, split)
    if scaled is not None:
        make = partial(plots.plot_reliability, scaled, table.accuracy, title=f"{label}, scaled")
        caption = f"{label}: the same after temperature scaling fitted on validation data."
        yield draw(label, f"reliability-{number}-scaled", caption, make)
    yield from _heads(group, split, number)
    yield from _neighborhoods(group, split, number)


def _scaled_confidence(group: Group, split: str) -> Tensor | None:
    temperatures = [run.metrics["methods"][group.method]["temperature"] for run in group.runs]
    if None in temperatures:
        return None
    parts = [run.predictions.splits[split].samples[group.method] for run in group.runs]
    scaled = [metrics.apply_temperature(mean_logits(part), t) for part, t in zip(parts, temperatures)]
    return torch.cat(scaled).max(dim=-1).values


def _heads(group: Group, split: str, number: int) -> Iterator[Drawn]:
    """Draw what every head attends to in the most certain mistakes, one row each."""
    weights = group.runs[0].predictions.splits[split].attention.get("mean")
    mistakes = certain_mistakes(group, split)
    if weights is None or not mistakes:
        return
    chosen = weights[[mistake.index for mistake in mistakes]]
    rows = [f"{mistake.predicted} not {mistake.label}" for mistake in mistakes]
    caption = f"{group.label}: mean attention of every head in the most certain mistakes of the first run, one row each."
    # heads first, examples as queries; the maps are means already, so there is one "draw"
    maps = chosen.transpose(0, 1).unsqueeze(0)
    make = partial(plots.plot_attention_heads, maps, queries=rows, title=group.label)
    yield draw(group.label, f"heads-{number}", caption, make, is_wide=True)


def _neighborhoods(group: Group, split: str, number: int) -> Iterator[Drawn]:
    """Draw the attention of the nodes behind the most certain mistakes, with its standard deviation."""
    predictions = group.runs[0].predictions
    edges = predictions.splits[split].edges
    if edges is None or "attention" not in group.method:
        return
    # classes of the sources; the left-out and unknown ones have no name
    names = [name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 1]}…" for name in predictions.class_names]
    called = [str(node) for node in range(int(edges.index.max()) + 1)]
    for node, label in zip(edges.index[0].tolist(), edges.source_labels.tolist()):
        called[node] = f"{node} {names[label]}" if 0 <= label < len(names) else str(node)
    for place, mistake in enumerate(certain_mistakes(group, split)[:NUM_NEIGHBORHOODS], start=1):
        node = int(edges.nodes[mistake.index])
        title = f"Node {node}: said {mistake.predicted}, is {mistake.label}"
        make = partial(
            plots.plot_edge_uncertainty,
            edges.index,
            edges.weights,
            node,
            labels=called,
            max_neighbors=12,
            title=title,
        )
        caption = f"{group.label}: attention of node {node} on its neighbors and their classes, last layer, mean over heads."
        yield draw(group.label, f"neighborhood-{number}-{place}", caption, make, is_wide=True)


def _doubtful(group: Group, split: str, number: int) -> Iterator[Drawn]:
    """Draw the most doubtful predictions of the first run in closed form: what their doubt comes from."""
    predictions = group.runs[0].predictions
    part, label = predictions.splits[split], group.label.removesuffix(f", {method_name(group.method)}")
    found = part.doubtful
    if found is None or part.labels is None or "mean" not in part.samples:
        return
    names = predictions.class_names
    for row, example in enumerate(found.examples[:NUM_DOUBTFUL].tolist()):
        probabilities = part.samples["mean"][0, example]
        said, right = names[int(probabilities.argmax())], right_answer(part.labels[example], names)
        margin, std = float(found.margin[row]), float(found.std[row])
        by_head = {f"layer {layer}": heads for layer, heads in enumerate(found.by_head[row])}
        options = {"class_names": names, "title": f"Example {example}: said {said}, is {right}"}
        if found.words is not None:
            words = found.words[row]
            make = partial(plots.plot_doubt, words, found.by_token[row, : len(words)], by_head, probabilities, **options)
        elif part.inputs is not None and predictions.key_grid is not None:
            image, grid = _as_rgb(part.inputs[example]), predictions.key_grid
            make = partial(plots.plot_image_doubt, image, found.by_token[row], by_head, probabilities, grid=grid, **options)
        else:
            return
        caption = (
            f"{label}, doubt in closed form: example {example}, said {said}, is {right}; margin {margin:.2f} with standard "
            f"deviation {std:.2f} under attention noise. Shades are shares of that variance."
        )
        yield draw(f"{label}, most doubtful answers", f"doubt-{number}-{row + 1}", caption, make, is_wide=True)


def _as_rgb(image: Tensor) -> Tensor:
    """Return an image in RGB; in one without colors, the largest value becomes black."""
    if image.ndim == 3:
        return image
    low, high = image.min(), image.max()
    return ((high - image) / (high - low).clamp(min=1e-12)).unsqueeze(-1).expand(-1, -1, 3)


def draw(section: str, name: str, caption: str, make: Callable[[], Figure], *, is_wide: bool = False) -> Drawn:
    """Call `make` under the light and the dark style and keep the pictures."""
    with matplotlib.rc_context(_COMMON):
        figure = make()
        light, png = _save(figure, "svg"), _save(figure, "png")
    with matplotlib.rc_context(_COMMON | _DARK):
        figure = make()
        _recolor(figure)
        dark = _save(figure, "svg")
    return Drawn(section, name, caption, _uri(light), _uri(dark), png, is_wide)


def _recolor(figure: Figure) -> None:
    """Replace the colors that plots set by hand and that vanish on a dark page: black lines and the light grid."""
    for ax in figure.axes:
        for line in (*ax.get_xgridlines(), *ax.get_ygridlines()):
            line.set_color(_GRID)
        for line in ax.lines:
            if to_hex(line.get_color()) == "#000000":
                line.set_color(_INK)


def _save(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def _uri(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
