"""Doubt on other tasks: which span and window are measured, and what the tables say."""

import csv
import dataclasses
import io
import json
from types import SimpleNamespace

import pytest
import torch
from language_files import write_squad
from rich.console import Console

import bayesattn as ba
from bayesattn.cli.registry import Request
from bayesattn.files import RunError
from bayesattn.metrics import aurc, auroc, correct
from bayesattn_recipes.doubt import elsewhere, questions
from bayesattn_recipes.doubt.rankings import BASELINE, DEVIATION, FLAGSHIP, NULL_SCORE
from bayesattn_recipes.graph.config import load_config_graph
from bayesattn_recipes.graph.inputs import whole_graph
from bayesattn_recipes.graph.train import fit
from bayesattn_recipes.graph.train import load_config as load_graph_config
from bayesattn_recipes.language.train import load_config, make_collator, make_model, prepare_run

TINY = ["encoder=tiny", "training.steps=2", "max_length=24", "training.batch_size=4", "training.precision=fp32"]


def value(rows, row, measure):
    (found,) = [r["value"] for r in rows if r["row"] == row and r["measure"] == measure]
    return found


@torch.no_grad()
def best_over_null(model, split, collator):
    """Return d of every question, by trying every span of every window."""
    best = [(-float("inf"), 0.0)] * len(split.questions)
    for row, window in zip(split.rows, split.windows, strict=True):
        batch = {name: x for name, x in collator([row]).items() if not name.endswith("positions")}
        outputs = model(**batch)
        start, end = outputs.start_logits[0], outputs.end_logits[0]
        places = [i for i, offset in enumerate(window.offsets) if offset is not None]
        span = max(float(start[i] + end[j]) for i in places for j in places if i <= j < i + 30)
        best[window.owner] = max(best[window.owner], (span, span - float(start[0] + end[0])))
    return torch.tensor([d for _, d in best])


def test_window_with_the_best_span_speaks_for_its_question(tmp_path):
    data = write_squad(tmp_path, "2.0", impossible=(1,))
    # so short that paragraphs have several windows
    config = load_config("squad2", ["attention.variant=soft", *TINY, "max_length=20"])
    prepared = prepare_run(config, data)
    torch.manual_seed(3)
    model = ba.restore(make_model(config, prepared)).eval()
    split, collator = prepared.splits["test"], make_collator(config, prepared.tokenizer)
    assert len(split.windows) > len(split.questions)
    d = best_over_null(model, split, collator)
    is_open = torch.tensor([not question.answers for question in split.questions])
    rows = questions.of_questions(model, split, collator)
    assert value(rows, NULL_SCORE, "AUROC of unanswerable") == float(auroc(-d[~is_open], -d[is_open]))
    assert {r["row"] for r in rows if r["measure"] == "AURC"} == {BASELINE, NULL_SCORE, FLAGSHIP}


def test_answers_of_nodes_are_those_of_the_whole_graph(monkeypatch):
    monkeypatch.setattr(elsewhere, "NODES_PER_PASS", 23)
    config = load_graph_config("generated-soft", ["training.epochs=5", "num_heads=2"])
    graph = load_config_graph(config, None)
    model, nodes = fit(config, graph)[0].eval(), graph.splits["test"]
    with torch.no_grad():
        probabilities = torch.softmax(model(*whole_graph(graph))[nodes], dim=1)
    is_right = correct(probabilities, graph.labels[nodes])
    rows = elsewhere.run_graph(config, None)
    assert value(rows, "all", "accuracy") == float(is_right.mean())
    assert value(rows, BASELINE, "AURC") == pytest.approx(float(aurc(probabilities.max(dim=1).values, is_right)), abs=1e-4)


def test_answers_that_nothing_moves_come_first_and_are_also_left_out():
    found = SimpleNamespace(
        probabilities=torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2]]), t=torch.tensor([1.0, float("inf"), 3.0])
    )
    rows = elsewhere.of_classes([found], torch.tensor([0, 1, 0]))
    # the wrong answer is the only one that is infinitely sure: risks 1, 1/2, 1/3
    assert value(rows, FLAGSHIP, "AURC") == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert value(rows, BASELINE, "AURC") == pytest.approx(1 / 9)
    assert value(rows, FLAGSHIP, "AURC of nodes with neighbors") == 0.0


def test_finished_models_are_read_and_the_rest_is_trained(tmp_path):
    data, out, text = write_squad(tmp_path / "data", "2.0", impossible=(1,)), tmp_path / "out", io.StringIO()
    settings = {"squad2": TINY, "digits": ["training.epochs=1"]}
    options = {"seeds": dict.fromkeys(elsewhere.PARTS, 1), "settings": settings}
    digits = Request(names=["digits"], data=data, out=out, console=Console(file=text))
    elsewhere.run(digits, **options)
    cell = out / "cells" / "digits-0.json"
    changed = json.loads(cell.read_text())
    changed["measures"]["rows"][0]["value"] = 0.125
    cell.write_text(json.dumps(changed))
    page = elsewhere.run(dataclasses.replace(digits, names=["squad2", "digits"]), **options).read_text()
    with (out / "doubt-elsewhere.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["task", "seed", "row", "measure", "value"]
    assert [r["value"] for r in rows if r["task"] == "digits" and r["measure"] == "accuracy"] == ["0.125"]
    assert {r["row"] for r in rows if r["measure"] == "AUROC of unanswerable"} == {
        BASELINE, NULL_SCORE, FLAGSHIP, DEVIATION,
    }  # fmt: skip
    assert "| digits, accuracy, all | 1 | 12.50 |" in page
    with pytest.raises(RunError, match="other settings"):
        elsewhere.run(digits, **{**options, "settings": {"digits": ["training.epochs=2"]}})


def test_table_compares_seed_by_seed():
    rows = [
        {"task": "digits", "seed": seed, "row": row, "measure": "AURC", "value": level}
        for row, levels in ((BASELINE, (0.02, 0.04, 0.09)), (FLAGSHIP, (0.01, 0.02, 0.06)))
        for seed, level in enumerate(levels)
    ]
    line = elsewhere.table(rows).splitlines()[3]
    # differences −1, −2, −3: t(2) · s / √3 = 4.303 · 1 / 1.732
    assert line.startswith("| digits, AURC, closed form | 3 | 3.00 | -2.00 ± 2.48 | 0.074 |")
