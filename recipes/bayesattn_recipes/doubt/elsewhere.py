"""Does doubt in closed form help elsewhere? Unanswerable questions, translations, captions, digits, nodes of graphs.

    python -m bayesattn_recipes.doubt.elsewhere --parts translation,captioning --data DIR --out DIR --jobs 10

All models are trained with ordinary attention. All rankings of a model order the same answers, so accuracy, or the
mean quality of sentences, is the same in every row. One job is one data set and seed. It keeps its measures, or
sentences, in `cells/TASK-SEED.json`; finished ones are not repeated.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from rich.console import Console
from torch import Tensor

import bayesattn as ba
from bayesattn.cli.registry import Request
from bayesattn.files import RunError, write_bytes
from bayesattn_recipes.captioning import train as captioning
from bayesattn_recipes.captioning.data import CaptionData, load_data
from bayesattn_recipes.common.cells import CELLS_FOLDER, FAILURES_FOLDER, check_complete, run_cells
from bayesattn_recipes.common.config import seed_everything
from bayesattn_recipes.common.doubt import with_noise
from bayesattn_recipes.common.folders import write_csv
from bayesattn_recipes.common.loop import train
from bayesattn_recipes.common.tables import (
    choose,
    markdown,
    paired,
    print_tables,
    show,
    show_p,
)
from bayesattn_recipes.digits import train as digits
from bayesattn_recipes.digits.data import load_splits
from bayesattn_recipes.doubt import questions, sentences
from bayesattn_recipes.doubt.rankings import BASELINE, FLAGSHIP, NULL_SCORE, Row, ranked
from bayesattn_recipes.graph import train as graph
from bayesattn_recipes.graph.config import load_config_graph
from bayesattn_recipes.graph.inputs import neighborhood
from bayesattn_recipes.language import train as language
from bayesattn_recipes.language.model import unpacked
from bayesattn_recipes.language.prepare import Prepared
from bayesattn_recipes.translation import train as translation
from bayesattn_recipes.translation.data import load_splits as load_pairs
from bayesattn_recipes.translation.text import Pairs

# data sets and seeds of each part, slow ones first
PARTS = {
    "squad2": ("squad2",),
    "translation": ("multi30k",),
    "captioning": ("flickr8k",),
    "graph": ("pubmed", "citeseer"),
    "digits": ("digits",),
}
SENTENCES = ("translation", "captioning")
SEEDS = {"squad2": 3, "translation": 5, "captioning": 5, "graph": 5, "digits": 10}
CSV_FILE, TABLE_FILE = "doubt-elsewhere.csv", "doubt-elsewhere.md"
# nodes of a graph that share a pass through their neighborhood
NODES_PER_PASS = 25

Settings = Mapping[str, Sequence[str]]


def of_classes(found: Sequence[Any], labels: Int[Tensor, " n"]) -> list[Row]:
    """Measure the results of `ba.uncertainty` on batches of a classifier."""
    probabilities, t = torch.cat([x.probabilities for x in found]), torch.cat([x.t for x in found])
    confidence, label = probabilities.max(dim=1)
    correct = label == labels
    # t is infinite if nothing moves an answer: a node without neighbors attends to itself alone
    most = 2.0 * t[t.isfinite()].abs().max()
    rows = ranked(correct, {BASELINE: confidence, FLAGSHIP: t.clamp(max=float(most))})
    if not bool(t.isfinite().all()):
        moved = t.isfinite()
        rows += ranked(correct[moved], {BASELINE: confidence[moved], FLAGSHIP: t[moved]}, " of nodes with neighbors")
    return rows


def run_digits(config: digits.DigitsConfig) -> list[Row]:
    """Train a digit classifier and measure its answers to the test images."""
    model, test = digits.fit(config)[0].cpu(), load_splits(config.train_size)["test"]
    assert test.labels is not None
    with with_noise(model):
        return of_classes([ba.uncertainty(model, test.images)], test.labels)


def run_graph(config: Any, data: Path | None) -> list[Row]:
    """Train a graph attention network and measure its answers for the test nodes, each exactly."""
    whole = load_config_graph(config, data)
    model, nodes = graph.fit(config, whole)[0].cpu(), whole.splits["test"]
    with with_noise(model):
        found = [
            ba.uncertainty(model, tuple(neighborhood(whole, part)), nodes=torch.arange(len(part)))
            for part in nodes.split(NODES_PER_PASS)
        ]
    return of_classes(found, whole.labels[nodes])


def run_translation(config: translation.TranslationConfig, data: Path | None) -> sentences.Sentences:
    """Train a translator and measure its translations of the main test set."""
    seed_everything(config.seed)
    experiment = translation.build_experiment(config, data)
    train(experiment, config.training, seed=config.seed)
    with with_noise(experiment.model.eval()) as model:
        return sentences.of_translations(model, experiment.vocabulary, _main_test(config, data).sources)


def run_captioning(config: captioning.CaptioningConfig, data: CaptionData) -> sentences.Sentences:
    """Train a captioning model and measure its captions of the test images."""
    model, _ = captioning.fit(config, data)
    with with_noise(model.eval()):
        return sentences.of_captions(model, data, data.splits["test"], captioning.search_options(config))


def _main_test(config: translation.TranslationConfig, data: Path | None) -> Pairs:
    return next(pairs for name, pairs in load_pairs(config.dataset, data).items() if name.startswith("test"))


def score_sentences(
    part: str, task: str, cells: Mapping[int, Row], settings: Sequence[str], data: Path | None
) -> dict[int, list[Row]]:
    """Return the rows of every model of a data set, by seed; their sentences are compared with its references."""
    said = {seed: sentences.Sentences(**cell["sentences"]) for seed, cell in cells.items()}
    if part == "translation":
        targets = _main_test(translation.load_config(f"{task}-soft", settings), data).targets
        quality = {seed: sentences.translation_quality(found, targets) for seed, found in said.items()}
    else:
        captions = load_data(captioning.load_config(f"{task}-soft", settings).dataset, data).splits["test"].captions
        quality = {seed: sentences.caption_quality(found, captions) for seed, found in said.items()}
    return {seed: sentences.measure(found, quality[seed]) for seed, found in said.items()}


def run_one(
    part: str, task: str, seed: int, settings: Sequence[str], data: Path | None, prepared: Prepared | None
) -> dict[str, Any]:
    """Train one model and return the measures of its rankings, or its sentences."""
    all_settings = [*settings, f"seed={seed}"]
    if part in SENTENCES:
        if part == "translation":
            said = run_translation(translation.load_config(f"{task}-soft", all_settings), data)
        else:
            config = captioning.load_config(f"{task}-soft", all_settings)
            said = run_captioning(config, load_data(config.dataset, data))
        return {"sentences": dataclasses.asdict(said)}
    if part == "squad2":
        assert prepared is not None
        return {"rows": questions.run(language.load_config(task, all_settings), data, prepared)}
    if part == "digits":
        return {"rows": run_digits(digits.load_config("soft", all_settings))}
    return {"rows": run_graph(graph.load_config(f"{task}-soft", all_settings), data)}


def run(request: Request, *, seeds: Mapping[str, int] = SEEDS, settings: Settings | None = None) -> Path:
    """Run what is missing, and write the CSV and the table of the finished jobs; return the Markdown file.

    Args:
        request: `names` are of `PARTS`; seeds and settings differ by part and are not those of the request.
        seeds: Models per data set, by part.
        settings: `name=value` on top of the configs, by part.
    """
    data, out = request.data, request.out
    chosen = choose("parts", request.names, tuple(PARTS))
    if min(seeds[part] for part in chosen) < 1:
        raise ValueError(f"seeds must be at least 1, got {min(seeds[part] for part in chosen)}")
    precision = ["training.precision=bf16"] if torch.cuda.is_available() else []
    given = {**(settings or {})}
    given["squad2"] = ["attention.variant=soft", *precision, *given.get("squad2", ())]
    # on every machine, so that one without a GPU can score the sentences of one with a GPU
    given["translation"] = ["training.precision=bf16", *given.get("translation", ())]
    runs = [(p, task, seed) for p in chosen for task in PARTS[p] for seed in range(seeds[p])]
    with ExitStack() as stack:

        def arguments(missing: list[tuple[str, str, int]]) -> list[tuple[Any, ...]]:
            prepared = None
            if any(part == "squad2" for part, _, _ in missing):
                prepared = language.prepare_run(language.load_config("squad2", given["squad2"]), data)
                stack.enter_context(unpacked(prepared.encoder))
            return [(*run, given.get(run[0], ()), data, prepared if run[0] == "squad2" else None) for run in missing]

        finished, outcome = run_cells(
            request,
            {f"{task}-{seed}": (part, task, seed) for part, task, seed in runs},
            lambda run: {"task": run[1], "seed": run[2], "settings": list(given.get(run[0], ()))},
            run_one,
            arguments,
        )
    found: list[Row] = []
    for part, task in ((p, task) for p in chosen for task in PARTS[p]):
        cells = {run[2]: cell for run, cell in finished.items() if run[1] == task}
        if part in SENTENCES and cells:
            try:
                by_seed = score_sentences(part, task, cells, given.get(part, ()), data)
            except ValueError as error:
                kept = out / CELLS_FOLDER
                raise RunError(f"sentences of {task} are in {kept}, but cannot be scored here: {error}") from None
        else:
            by_seed = {seed: cell["rows"] for seed, cell in cells.items()}
        found += [{"task": task, "seed": seed, **row} for seed, rows in by_seed.items() for row in rows]
    if not found:
        raise RunError(f"no model has finished: {outcome.reasons()} (tracebacks in {out / FAILURES_FOLDER})")
    write_csv(out / CSV_FILE, found)
    text = table(found)
    write_bytes(out / TABLE_FILE, text.encode())
    print_tables(request.console, text)
    check_complete(outcome, request, "not all models were trained")
    return out / TABLE_FILE


def table(rows: Sequence[Row]) -> str:
    """Return means over seeds, and the paired differences of every order to the model's own confidence and null score."""
    values: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for r in rows:
        values.setdefault((r["task"], r["measure"]), {}).setdefault(r["row"], {})[r["seed"]] = 100.0 * r["value"]
    body = []
    baselines = [own for own in (BASELINE, NULL_SCORE) if any(own in by_row for by_row in values.values())]
    for (task, measure), by_row in values.items():
        for name, of_seed in by_row.items():
            cells = [str(len(of_seed)), f"{sum(of_seed.values()) / len(of_seed):.2f}"]
            for own in baselines:
                known = own in by_row and name not in (own, BASELINE)
                against = paired(of_seed, by_row[own]) if known else None
                cells += ["–", "–"] if against is None else [show(against.difference), show_p(against.p_value)]
            body.append([f"{task}, {measure}, {name}", *cells])
    header = ["per cent", "seeds", "mean", *(cell for own in baselines for cell in (f"minus {own}", "p"))]
    return markdown(header, body)


def page_tables(rows: Sequence[Row]) -> tuple[str, str]:
    """Return the tables of the results page: of answers, and of sentences, by rank correlation with one measure each."""
    tasks = {task for part in SENTENCES for task in PARTS[part]}
    shown = ("Spearman with chrF", "Spearman with CIDEr")
    sentences_alone = [row for row in rows if row["task"] in tasks and row["measure"] in shown]
    return table([row for row in rows if row["task"] not in tasks]), table(sentences_alone)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Does doubt in closed form help elsewhere?")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seeds", type=int, help="models per data set; without it 3 of squad2, 10 of digits, else 5")
    parser.add_argument("--data", type=Path, help="folder with squad and the encoder, multi30k, flickr8k, planetoid")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--jobs", type=int, default=1, help="models at the same time")
    parser.add_argument("--minutes", type=float, help="no training begins later than this")
    given = parser.parse_args()
    request = Request(
        names=given.parts.split(","), data=given.data, out=given.out, console=Console(), jobs=given.jobs,
        minutes=given.minutes,
    )  # fmt: skip
    run(request, seeds=SEEDS if given.seeds is None else dict.fromkeys(PARTS, given.seeds))


if __name__ == "__main__":
    main()
