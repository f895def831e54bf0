"""The study of doubt: controls against autograd, Laplace against plain algebra, and its table through the command line."""

import csv
import math
import random

import pytest
import torch
from language_files import call
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from bayesattn_recipes.common.tables import holm
from bayesattn_recipes.doubt import laplace
from bayesattn_recipes.doubt.gradients import PLACES, squared_gradients
from bayesattn_recipes.doubt.rankings import BASELINE, FLAGSHIP, PREDICTIVES, RANKINGS
from bayesattn_recipes.doubt.table import pool, read_rows

SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20, "vocab_size": 31}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**SIZES, num_labels=3)).double().eval()


@pytest.fixture
def batch():
    torch.manual_seed(1)
    mask = torch.ones(5, 7, dtype=torch.long)
    mask[2, 4:] = 0
    return {"input_ids": torch.randint(1, 31, (5, 7)), "attention_mask": mask}


def margin(model, batch):
    first, second = model(**batch).logits.topk(2, dim=-1).values.unbind(dim=-1)
    return first - second


def test_gradients_of_parameters_are_each_examples_own(model, batch):
    found = squared_gradients(model, batch)
    linear = [p for module in model.modules() if isinstance(module, nn.Linear) for p in module.parameters()]
    for example in range(5):
        one = {name: value[example : example + 1] for name, value in batch.items()}
        gradients = torch.autograd.grad(margin(model, one).sum(), linear)
        expected = sum(float(gradient.square().sum()) for gradient in gradients)
        assert float(found["parameters"][example]) == pytest.approx(expected, rel=1e-9)


def test_gradients_of_embeddings_are_those_of_noise_added_to_them(model, batch):
    found = squared_gradients(model, batch)
    with torch.no_grad():
        embedded = model.bert.embeddings(batch["input_ids"])
    embedded.requires_grad_()
    hook = model.bert.embeddings.register_forward_hook(lambda module, given, output: embedded)
    (gradient,) = torch.autograd.grad(margin(model, batch).sum(), embedded)
    hook.remove()
    torch.testing.assert_close(found["embeddings"], gradient.square().sum(dim=(1, 2)), rtol=1e-9, atol=0)


def test_every_place_has_a_positive_number_per_example_and_hooks_are_gone(model, batch):
    before = model(**batch).logits
    found = squared_gradients(model, batch)
    assert set(found) == set(PLACES)
    assert all(values.shape == (5,) and bool((values > 0).all()) for values in found.values())
    assert torch.equal(model(**batch).logits, before)
    assert not any(module._forward_hooks for module in model.modules())


def test_laplace_is_the_inverse_of_the_written_out_hessian():
    torch.manual_seed(2)
    inputs, weight = torch.randn(29, 3).double(), torch.randn(2, 4).double()
    train = laplace.Features(inputs, torch.cat([inputs, torch.ones(29, 1)], dim=1) @ weight.T)

    def loss(flat):
        logits = train.with_bias @ flat.reshape(2, 4).T
        return nn.functional.cross_entropy(logits, train.logits.softmax(dim=1), reduction="sum")

    hessian = torch.autograd.functional.hessian(loss, weight.flatten())
    head = laplace.fit(train, train, torch.randint(2, (29,)))
    posterior = torch.linalg.inv(hessian + head.precision * torch.eye(8))
    jacobian = torch.stack([torch.kron(torch.eye(2, dtype=torch.float64), phi) for phi in train.with_bias])
    expected = jacobian @ posterior @ jacobian.transpose(1, 2)
    torch.testing.assert_close(head.covariance(train), expected, rtol=1e-6, atol=0)
    mean, t = laplace.predict(head, train)
    spread = expected[:, 0, 0] + expected[:, 1, 1] - 2 * expected[:, 0, 1]
    torch.testing.assert_close(t, (train.logits[:, 0] - train.logits[:, 1]).abs() / spread.sqrt())
    torch.testing.assert_close(mean.sum(dim=1), torch.ones(29).double())


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def write_tasks(folder):
    """CoLA and SST-2 in their formats, with labels that a tiny model can partly learn."""
    draw = random.Random(0)
    words = ["good", "bad", "film", "plot", "he", "left", "early", "not", "so", "very"]
    for task, count in (("CoLA", 200), ("SST-2", 200)):
        for split, number in (("train", count), ("dev", 37)):
            rows = []
            for _ in range(number):
                text = " ".join(draw.choices(words, k=draw.randint(3, 7)))
                label = int(("good" in text) != (draw.random() < 0.2))
                rows.append(f"x\t{label}\t\t{text}" if task == "CoLA" else f"{text}\t{label}")
            header = [] if task == "CoLA" else ["sentence\tlabel"]
            (folder / task).mkdir(parents=True, exist_ok=True)
            (folder / task / f"{split}.tsv").write_text("\n".join([*header, *rows]) + "\n")
    return folder


def test_the_table_through_the_command_line(tmp_path):
    data, out = write_tasks(tmp_path / "data"), tmp_path / "out"
    settings = ["encoder=tiny", "training.steps=12", "training.learning_rate=2e-3", "max_length=16", "train_size=96"]
    options = ["--tasks", "cola,sst2", "--seeds", 2, *(f"--set={setting}" for setting in settings)]
    assert call("reproduce", "doubt", "--data", data, "--out", out, *options) == 0
    rows = read_rows(out / "doubt.csv")
    # two seeds make no ensemble of three
    expected = {name for name in (*RANKINGS, *PREDICTIVES) if not name.startswith("ensemble")}
    assert {row["row"] for row in rows} == expected
    own = {(row["task"], row["seed"]): row["aurc"] for row in rows if row["row"] == BASELINE}
    assert len(own) == 4
    # binary: entropy and temperature rank as confidence does
    for name in ("own entropy", "temperature"):
        assert {(r["task"], r["seed"]): r["aurc"] for r in rows if r["row"] == name} == pytest.approx(own)
    found = {row.ranking: row for row in pool(rows)}[FLAGSHIP]
    logs = [math.log(row["aurc"] / own[row["task"], row["seed"]]) for row in rows if row["row"] == FLAGSHIP]
    assert found.change == pytest.approx(math.expm1(sum(logs) / 4))
    with (out / "doubt-pooled.csv").open() as file:
        assert {row["ranking"] for row in csv.DictReader(file)} == RANKINGS.keys() & expected - {BASELINE}
    assert (out / "doubt.png").stat().st_size > 10_000
    # what is finished is not repeated: without data there is nothing to train from
    times = {path: path.stat().st_mtime_ns for path in (out / "found").iterdir()}
    assert call("reproduce", "doubt", "--data", data, "--out", out, *options) == 0
    assert times == {path: path.stat().st_mtime_ns for path in (out / "found").iterdir()}


def test_measurements_can_be_left_out_and_ensembles_need_their_members(tmp_path):
    data, out = write_tasks(tmp_path / "data"), tmp_path / "out"
    settings = ["encoder=tiny", "training.steps=3", "max_length=16", "train_size=64"]
    options = ["--tasks", "cola", "--seeds", 3, "--variants", "dropout", *(f"--set={setting}" for setting in settings)]
    assert call("reproduce", "doubt", "--data", data, "--out", out, *options) == 0
    rows = {row["row"] for row in read_rows(out / "doubt.csv")}
    assert {BASELINE, FLAGSHIP, "MC dropout, 20: t", "MC dropout, 20: mean", "ensemble of 3"} <= rows
    absent = ("attention draws", "last-layer Laplace", "control", "ensemble of 5")
    assert not any(name.startswith(absent) for name in rows)
    assert "ensemble of 3" in (out / "doubt-table.md").read_text()


def test_unknown_measurements_are_refused(tmp_path, capsys):
    assert call("reproduce", "doubt", "--variants", "wc", "--data", tmp_path, "--out", tmp_path) == 2
    assert "variants must be among draws, dropout, laplace, controls" in capsys.readouterr().err
