"""Graph runs from config to report: train, resume, predict, measure, draw, reproduce, demo."""

import dataclasses
import io
import json
import os

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from bayesattn.cli.registry import Request
from bayesattn.evaluation.report import figures, measure_run, write_report
from bayesattn.evaluation.runs import read_predictions, write_predictions
from bayesattn_recipes.graph import demo, reproduce
from bayesattn_recipes.graph.config import load_config_graph
from bayesattn_recipes.graph.evaluate import available_methods, draw, edge_weights, measure_draws, predict_run
from bayesattn_recipes.graph.generated import generate_graph
from bayesattn_recipes.graph.inputs import whole_graph
from bayesattn_recipes.graph.train import build_experiment, fit, load_config, load_run, train_run
from processes import leave, run_on_two

TINY = ["training.epochs=3", "num_heads=2", "head_dim=3"]


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    train_run(load_config("generated-wc", [*TINY, "left_out_classes=1"]), folder)
    return folder


@pytest.fixture(scope="module")
def predictions(tiny_run):
    found = predict_run(tiny_run, num_samples=3, noise=(1.0,), methods=["mean", "attention", "attention+dropout"])
    write_predictions(tiny_run, found)
    return found


def test_run_folder_gives_the_network_back(tiny_run):
    config, model, graph = load_run(tiny_run)
    again, log = fit(config, graph)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    assert [json.loads(line) for line in (tiny_run / "log.jsonl").read_text().splitlines()] == log.rows


def test_predictions_are_probabilities_of_every_split_and_method(tiny_run, predictions):
    assert list(predictions.splits) == ["validation", "test", "noise-1", "left-out"]
    for name, split in predictions.splits.items():
        assert {method: len(samples) for method, samples in split.samples.items()} == {
            "mean": 1,
            "attention": 3,
            "attention+dropout": 3,
        }
        for samples in split.samples.values():
            # float32 softmax over four classes
            assert (samples.sum(dim=-1) - 1.0).abs().max() < 1e-6
        assert (split.labels is None) == (name == "left-out")


def test_edge_weights_sum_to_one_at_every_node_and_survive_the_file(tiny_run, predictions):
    edges = read_predictions(tiny_run).splits["test"].edges
    assert edges is not None
    totals = torch.zeros(3, 1000).index_add_(1, edges.index[1], edges.weights)
    # float32 sums of a dozen weights
    assert (totals[:, edges.nodes] - 1.0).abs().max() < 1e-5
    assert torch.equal(edges.weights, predictions.splits["test"].edges.weights)


def test_draws_differ_and_repeat_with_their_seed(tiny_run):
    _, model, graph = load_run(tiny_run)
    before = torch.get_rng_state()
    first, again, other = (draw(model, whole_graph(graph), "attention", 2, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_of_a_draw_are_those_the_layer_uses(tiny_run):
    _, model, graph = load_run(tiny_run)
    found = edge_weights(model, graph, graph.splits["test"], 2, 0)
    assert not torch.equal(found.weights[0], found.weights[1])
    assert found.index.shape[1] == found.weights.shape[1] == len(found.source_labels)
    again = edge_weights(model, graph, graph.splits["test"], 2, 0)
    assert torch.equal(found.weights, again.weights)
    # of the many draws the mean is near the weights of the posterior mean
    many = edge_weights(model, graph, graph.splits["test"], 200, 1).weights
    inputs = whole_graph(graph)
    with torch.no_grad():
        features = model.embed(inputs.x, inputs.edge_index)
        _, (_, mean) = model.output(features, inputs.output_edge_index, return_attention_weights=True)
    wanted = torch.isin(graph.edge_index[1], graph.splits["test"])
    # k = 5: a weight deviates by less than 0.15, its mean over 200 draws by 0.011; the softmax shifts it little
    assert (many.mean(dim=0) - mean.mean(dim=1)[wanted]).abs().max() < 0.07


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["dropout"]}, "method must be one of mean, attention, attention\\+dropout.* for BAM-WC, got 'dropout'"),
        ({"num_samples": 1}, "num_samples must be an integer of at least 2, got 1"),
    ],
)
def test_impossible_predictions_are_refused(tiny_run, options, message):
    with pytest.raises(ValueError, match=message):
        predict_run(tiny_run, **{"num_samples": 2, "noise": (), **options})


def test_mc_dropout_draws_from_a_soft_network():
    config = load_config("generated-soft", TINY)
    graph = generate_graph(97, num_train=20, num_validation=20)
    model, _ = fit(config, graph)
    draws = draw(model, whole_graph(graph), "dropout", 2, seed=0)
    assert not torch.equal(draws[0], draws[1])
    assert available_methods(config) == ["mean", "dropout"]
    assert available_methods(load_config("generated-soft", ["dropout=0"])) == ["mean"]


def test_temperature_comes_from_validation_nodes_alone():
    generator = torch.Generator().manual_seed(0)
    test, labels = torch.randn(1, 40, 3, generator=generator), torch.randint(3, (40,), generator=generator)
    sure = torch.nn.functional.one_hot(labels, 3)[None] * 20.0
    kind, harsh = (measure_draws(part, labels, test, labels) for part in (sure, -sure))
    assert kind["temperature"] < harsh["temperature"]
    assert kind["nll"] == harsh["nll"]


def test_report_shows_neighborhoods_of_mistakes(tiny_run, predictions, tmp_path):
    measure_run(tiny_run, num_resamples=0)
    page = write_report([tiny_run], tmp_path / "report.html", figures=tmp_path / "figures")
    assert list((tmp_path / "figures").glob("neighborhood-*-1.png"))
    assert "attention of node" in page.read_text(encoding="utf-8")


def test_broken_edges_in_predictions_are_named(tiny_run, predictions, tmp_path):
    test = predictions.splits["test"]
    bad = dataclasses.replace(test, edges=dataclasses.replace(test.edges, weights=test.edges.weights[:, 1:]))
    write_predictions(tmp_path, dataclasses.replace(predictions, splits={"test": bad}))
    with pytest.raises(ValueError, match=r"edges of split 'test' must have shapes .*, got"):
        read_predictions(tmp_path)


# tables


def _tiny_configs(monkeypatch, module):
    plain = module.load_config
    monkeypatch.setattr(
        module, "load_config", lambda name, settings=(): plain(name, [*settings, *TINY, "dataset=generated"])
    )


def test_reproduce_writes_tables_and_repeats_no_cell(monkeypatch, tmp_path):
    _tiny_configs(monkeypatch, reproduce)
    request = Request(names=["cora"], variants=["wc"], num_seeds=2, out=tmp_path, console=Console(quiet=True))
    table = reproduce.reproduce(request)
    text = table.read_text(encoding="utf-8")
    soft, ours, difference = (line for line in text.splitlines() if line.startswith(("| soft", "| wc")))
    assert soft.startswith("| soft | 2 |")
    assert soft.endswith("| 83.00 |")
    assert ours.endswith("| 83.81 |")
    assert difference.startswith("| wc − soft |")
    means = (tmp_path / "graph.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[:4] for line in means[1:]] == [["cora", "soft", "2", "83.0"], ["cora", "wc", "2", "83.81"]]
    assert len(list((tmp_path / "cells").iterdir())) == 4
    seeds = (tmp_path / "graph-seeds.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[:3] for line in seeds[1:]] == [["cora", v, s] for v in ("soft", "wc") for s in ("0", "1")]
    monkeypatch.setattr(reproduce, "run_seed", lambda *args: pytest.fail("trained again"))
    again = reproduce.reproduce(request)
    assert again.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("datasets", "variants", "message"),
    [
        (["corra"], None, "datasets must be among cora, .*, got 'corra'"),
        (None, ["gat"], "variants must be among soft, .*, got 'gat'"),
    ],
)
def test_unknown_rows_are_refused(tmp_path, datasets, variants, message):
    with pytest.raises(ValueError, match=message):
        reproduce.reproduce(Request(names=datasets, variants=variants, out=tmp_path, console=Console(quiet=True)))


def test_paired_differences_are_to_the_same_seed():
    def cell(accuracy):
        measured = {"accuracy": accuracy, **dict.fromkeys(("nll", "ece", "scaled_nll", "scaled_ece", "pavpu_05"), 0.5)}
        return {"methods": {"mean": measured, "attention": measured}, "train_cpu_seconds": 1.0}

    soft, ours = {0: cell(0.5), 1: cell(0.7)}, {1: cell(0.82), 0: cell(0.6)}
    _, row = reproduce.mean_rows("cora", {"soft": soft, "wc": ours})
    assert row["difference_to_soft"] == pytest.approx(11.0)
    assert row["accuracy"] == pytest.approx(71.0)


def test_a_cell_is_the_run_of_its_seed(monkeypatch, tmp_path):
    config = dataclasses.replace(load_config("generated-wc", TINY), seed=4)
    graph = load_config_graph(config, None)
    cell = reproduce.run_seed(config, graph)
    train_run(config, tmp_path / "run")
    found = predict_run(tmp_path / "run", num_samples=2, noise=()).splits["test"]
    right = (found.samples["mean"][0].argmax(dim=-1) == found.labels).float().mean()
    assert cell["methods"]["mean"]["accuracy"] == pytest.approx(float(right))
    assert list(cell["methods"]) == available_methods(config)
    assert cell["num_epochs"] == 3


def test_demo_prints_one_row_per_attention_and_prediction(tmp_path, monkeypatch):
    # the report of this recipe is drawn in a test above
    monkeypatch.setattr(figures, "draw_all", lambda groups: [])
    console = Console(width=80, record=True, file=io.StringIO())
    folders = demo.run_demo(tmp_path, num_seeds=2, num_samples=2, epochs=2, console=console)
    text = console.export_text()
    assert [folder.name for folder in folders] == [f"generated-{kind}-{seed}" for kind in ("soft", "wc") for seed in (0, 1)]
    # without a terminal there is no bar, but a line per model
    assert text.startswith("graph: soft, seed 0: run 1 of 4\n")
    assert all(name in text for name in ("soft, no draws", "soft, MC dropout", "BAM-WC, no draws", "BAM-WC, draws"))
    # no cell is cut off at eighty columns
    assert "…" not in text


# two processes


def _train_in_process(rank: int, port: str, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(1)
    from bayesattn_recipes.common.loop import train

    settings = [*TINY, "training.batch_size=250", "prior_scope=neighborhood", "fanout=3"]
    config = load_config("generated-wc", settings)
    torch.manual_seed(0)
    experiment = build_experiment(config)
    train(experiment, config.training, seed=0)
    parameters = torch.cat([parameter.detach().flatten() for parameter in experiment.model.parameters()])
    both = [torch.empty_like(parameters) for _ in range(2)]
    dist.all_gather(both, parameters)
    assert torch.equal(both[0], both[1])
    assert bool(torch.isfinite(parameters).all())
    leave()


@pytest.mark.slow
def test_two_processes_train_one_network_in_batches(tmp_path):
    from torch.distributed.elastic.utils.distributed import get_free_port

    run_on_two(_train_in_process, str(get_free_port()), str(tmp_path))
