"""Graph runs from config to report: train, resume, predict, measure, draw, reproduce, demo."""

import dataclasses
import io
import json
import math
import os

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from bayesattn.evaluation.report import measure_run, write_report
from bayesattn.evaluation.runs import read_predictions, write_predictions
from bayesattn_recipes.graph import compare, demo, reproduce, robustness, search, settings
from bayesattn_recipes.graph.evaluate import available_methods, draw, edge_weights, measure_draws, predict_run
from bayesattn_recipes.graph.generated import generate_graph
from bayesattn_recipes.graph.inputs import GraphInputs
from bayesattn_recipes.graph.many import train_many, write_runs
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


def test_copies_are_written_as_runs_of_their_own(tmp_path):
    config = load_config("generated-soft", TINY)
    graph = generate_graph()
    runs = train_many(config, graph, [6, 8])
    write_runs(runs, config, [tmp_path / "6", tmp_path / "8"])
    own, model, _ = load_run(tmp_path / "8")
    assert own == dataclasses.replace(config, seed=8)
    inputs = GraphInputs.of(graph)
    with torch.no_grad():
        assert torch.allclose(model(inputs)[0], runs.model(inputs)[1], atol=1e-6)
    with pytest.raises(ValueError, match="folders has 1 entries; allowed: 2"):
        write_runs(runs, config, [tmp_path / "9"])


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
    inputs = GraphInputs.of(graph)
    first, again, other = (draw(model, inputs, "attention", 2, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])
    assert model.hidden.generators == [None]


def test_weights_of_a_draw_are_those_the_layer_uses(tiny_run):
    _, model, graph = load_run(tiny_run)
    found = edge_weights(model, graph, graph.splits["test"], 2, 0)
    assert not torch.equal(found.weights[0], found.weights[1])
    assert found.index.shape[1] == found.weights.shape[1] == len(found.source_labels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["dropout"]}, "method is 'dropout'; allowed for BAM-WC: mean, attention, attention\\+dropout"),
        ({"num_samples": 1}, "num_samples is 1; allowed: an integer of at least 2"),
    ],
)
def test_impossible_predictions_are_refused(tiny_run, options, message):
    with pytest.raises(ValueError, match=message):
        predict_run(tiny_run, **{"num_samples": 2, "noise": (), **options})


def test_mc_dropout_draws_from_a_soft_network():
    config = load_config("generated-soft", TINY)
    graph = generate_graph(97, num_train=20, num_validation=20)
    model = train_many(config, graph, [0]).model
    draws = draw(model, GraphInputs.of(graph), "dropout", 2, seed=0)
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


def test_report_shows_neighbourhoods_of_mistakes(tiny_run, predictions, tmp_path):
    measure_run(tiny_run, num_resamples=0)
    page = write_report([tiny_run], tmp_path / "report.html", figures=tmp_path / "figures")
    assert list((tmp_path / "figures").glob("neighbourhood-*-1.png"))
    assert "attention of node" in page.read_text(encoding="utf-8")


def test_broken_edges_in_predictions_are_named(tiny_run, predictions, tmp_path):
    test = predictions.splits["test"]
    bad = dataclasses.replace(test, edges=dataclasses.replace(test.edges, weights=test.edges.weights[:, 1:]))
    write_predictions(tmp_path, dataclasses.replace(predictions, splits={"test": bad}))
    with pytest.raises(ValueError, match="edges of split 'test' have shapes"):
        read_predictions(tmp_path)


# tables


def _tiny_configs(monkeypatch, module):
    plain = module.load_config
    monkeypatch.setattr(
        module, "load_config", lambda name, settings=(): plain(name, [*settings, *TINY, "dataset=generated"])
    )


def test_reproduce_writes_tables_and_repeats_no_cell(monkeypatch, tmp_path):
    _tiny_configs(monkeypatch, reproduce)
    console = Console(quiet=True)
    table = reproduce.reproduce(["cora"], ["wc"], num_seeds=2, data=None, out=tmp_path, console=console)
    text = table.read_text(encoding="utf-8")
    assert "| cora soft | 2 | 83.00 |" in text
    assert "| cora wc | 2 | 83.81 |" in text
    rows = json.loads((tmp_path / "graph.json").read_text(encoding="utf-8"))["rows"]
    assert [row["num_seeds"] for row in rows] == [2, 2]
    assert len(list((tmp_path / "cells").iterdir())) == 4
    seeds = (tmp_path / "graph-seeds.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[:3] for line in seeds[1:]] == [["cora", v, s] for v in ("soft", "wc") for s in ("0", "1")]
    monkeypatch.setattr(reproduce, "run_seeds", lambda *args: pytest.fail("trained again"))
    again = reproduce.reproduce(["cora"], ["wc"], num_seeds=2, data=None, out=tmp_path, console=console)
    assert again.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("datasets", "variants", "message"),
    [(["corra"], None, "datasets has 'corra'; allowed: cora"), (None, ["gat"], "variants has 'gat'; allowed: soft")],
)
def test_unknown_rows_are_refused(tmp_path, datasets, variants, message):
    with pytest.raises(ValueError, match=message):
        reproduce.reproduce(datasets, variants, num_seeds=1, data=None, out=tmp_path, console=Console(quiet=True))


def test_paired_differences_are_to_the_same_seed():
    def cell(accuracy):
        measured = {"accuracy": accuracy, **dict.fromkeys(("nll", "ece", "scaled_nll", "scaled_ece", "pavpu_05"), 0.5)}
        return {"methods": {"mean": measured, "attention": measured}, "train_cpu_seconds": 1.0}

    soft, ours = {0: cell(0.5), 1: cell(0.7)}, {1: cell(0.82), 0: cell(0.6)}
    _, row = reproduce.table_rows("cora", {"soft": soft, "wc": ours})
    assert row["difference_to_soft"] == pytest.approx(11.0)
    assert row["accuracy"] == pytest.approx(71.0)


def _tiny_search(monkeypatch, tmp_path, **options):
    for module in (search, settings):
        _tiny_configs(monkeypatch, module)
    monkeypatch.setattr(settings, "POINTS", 2)
    monkeypatch.setattr(search, "NUM_SAMPLES", 2)
    options = {"num_seeds": 2, "rounds": range(2), "limit": math.inf, "data": None, "device": "cpu", **options}
    return search.search("generated", **options, out=tmp_path / "search.csv")


def test_search_gives_every_kind_the_same_number_of_settings(monkeypatch, tmp_path):
    rows = _tiny_search(monkeypatch, tmp_path)
    assert {kind: sum(row["kind"] == kind for row in rows) for kind in search.KINDS} == dict.fromkeys(search.KINDS, 16)
    shared = [
        {(row["dropout"], row["weight_decay"]) for row in rows if row["kind"] == k and not row["round"]}
        for k in search.KINDS
    ]
    assert shared[0] == shared[1] == shared[2]
    assert all(0.0 <= row["accuracy"] <= 1.0 and row["scaled_nll"] > 0.0 for row in rows)
    assert len(search.read_rows(tmp_path / "search.csv")) == len(rows)


def test_search_stops_before_its_limit_after_a_whole_round(monkeypatch, tmp_path):
    rows = _tiny_search(monkeypatch, tmp_path, limit=0.0)
    assert {row["round"] for row in rows} == {0}
    assert {row["kind"] for row in rows} == set(search.KINDS)


def test_search_with_few_labels_trains_on_its_share_of_them(monkeypatch, tmp_path):
    options = {"rounds": [1], "num_seeds": 1}
    found = [_tiny_search(monkeypatch, tmp_path, **options, labels=share) for share in (1.0, 0.25)]
    labels = [rows[0]["num_labels"] for rows in found]
    assert labels[1] == pytest.approx(labels[0] / 4, abs=2)


def test_search_reads_validation_nodes_only(monkeypatch):
    _tiny_configs(monkeypatch, settings)
    monkeypatch.setattr(settings, "POINTS", 1)
    graph = generate_graph(97, num_train=20, num_validation=20)
    del graph.splits["test"]
    rows = search.run_round("generated", "wc", 0, [graph], GraphInputs.of(graph), [1], "cpu")
    assert [row["method"] for row in rows][:1] == ["mean"]


def test_chosen_is_the_lowest_scaled_nll_among_the_accurate(tmp_path):
    def row(kind, method, dropout, accuracy, scaled_nll, **own):
        shared = {"learning_rate": 0.01, "head_dim": 8, "weight_decay": 5e-4, "dropout": dropout, "num_labels": 140}
        found = {"accuracy": accuracy, "nll": 1.0, "scaled_nll": scaled_nll}
        return {"kind": kind, "method": method, "seed": 100, **found, **shared, **own}

    noise = {"attention.weibull_k": 2.0, "attention.gamma_beta": 0.1, "kl_weight": 0.1}
    rows = [
        # the third is the best by NLL, but two points less accurate; the second within one
        *(row("soft", "mean", d, a, n) for d, a, n in ((0.2, 0.80, 0.6), (0.4, 0.795, 0.5), (0.6, 0.78, 0.4))),
        *(row("soft", "all", d, 0.8, n) for d, n in ((0.0, 0.1), (0.6, 0.5))),
        *(row("nokl", m, 0.2, 0.8, n, **{"attention.weibull_k": 2.0}) for m, n in (("mean", 0.5), ("all", 0.4))),
        *(row("wc", m, 0.2, 0.8, n, **noise) for m, n in (("mean", 0.4), ("all", 0.5))),
    ]
    chosen = search.choose(rows)
    assert [chosen[kind]["method"] for kind in ("soft", "dropout", "nokl", "wc")] == ["mean", "all", "all", "mean"]
    assert [chosen[kind]["num_points"] for kind in ("soft", "dropout", "nokl", "wc")] == [3, 1, 1, 1]
    assert chosen["soft"]["point"]["dropout"] == 0.4
    # MC dropout must drop
    assert chosen["dropout"]["point"]["dropout"] == 0.6
    # by AURC the accuracy is no condition; rows of a search that did not measure it do not count, nor kinds without a row
    ranked = [{**one, "aurc": one["scaled_nll"]} for one in rows[:3]]
    by_aurc = search.choose([*ranked, *rows[5:]], "aurc")
    assert list(by_aurc) == ["soft"]
    assert by_aurc["soft"]["point"]["dropout"] == 0.6
    for choice, found in chosen.items():
        config = load_config(str(search.write_config("cora", choice, found, tmp_path)))
        assert config.dropout == found["point"]["dropout"]
    assert config.training.kl_schedule.final == pytest.approx(14.0)
    assert config.prior_scope == "neighbourhood"
    assert config.attention.kl_reduction == "row_mean"


def test_search_grids_name_settings_that_exist():
    for kind in search.KINDS:
        for number in range(len(settings.ROUNDS)):
            points = settings.draw_points(kind, number)
            assert len(points) == settings.POINTS
            for point in points:
                settings.point_config("cora", kind, point, 140)


@pytest.fixture
def tiny_study(monkeypatch, tmp_path):
    plain = robustness.load_config

    def tiny(name, settings=()):
        _, kind, _ = name.split("-")
        return plain(f"generated-{'soft' if kind == 'dropout' else kind}", [*settings, *TINY])

    monkeypatch.setattr(robustness, "load_config", tiny)
    monkeypatch.setattr(robustness, "NUM_SAMPLES", 3)
    monkeypatch.setattr(robustness, "PREDICTED", {"edges added 50 %": robustness.PREDICTED["edges added 50 %"]})
    options = {"num_seeds": 3, "members": 2, "limit": math.inf, "data": None, "device": "cpu", "out": tmp_path / "rows.csv"}
    return lambda **changes: robustness.study("generated", **{**options, **changes})


def test_robustness_study_has_every_series_seed_and_situation(tiny_study, tmp_path):
    rows = tiny_study(trained=["clean", "class left out"])
    series = {"soft", "ensemble", "dropout", *(kind + end for kind in ("nokl", "wc") for end in ("", "-mean", "-attention"))}
    assert {row["series"] for row in rows} == series
    # three seeds on two test graphs of the clean training and one of the other; attention alone only where it was trained
    assert len(rows) == 3 * (3 * 7 + 2 * 2)
    assert all(("ood_auroc" in row) == (row["trained"] == "class left out") for row in rows)
    assert all(("pavpu_05" in row) == (row["series"] not in ("soft", "nokl-mean", "wc-mean")) for row in rows)
    assert {row["seed"] for row in rows if row["series"] == "ensemble"} == {0, 1, 2}
    read = compare.read_rows([tmp_path / "rows.csv"])
    assert {row["situation"] for row in read} == {"clean", "edges added 50 %", "class left out"}
    for measure in ("accuracy", "aurc"):
        figure = compare.plot(read, measure, {"generated": ["nokl", "wc-mean"]})
        assert len(figure.axes[0].get_xticks()) == 3
    assert "BAM-WC, draws of attention alone" in compare.overview(read)


def test_first_member_of_an_ensemble_is_the_run_of_the_seed(tiny_study, monkeypatch):
    monkeypatch.setattr(robustness, "PREDICTED", {})
    alone, together = (tiny_study(trained=["clean"], kinds=["soft"], members=members) for members in (1, 2))
    alone, together = ({row["seed"]: row["nll"] for row in rows if row["series"] == "soft"} for rows in (alone, together))
    assert alone == pytest.approx(together, abs=1e-5)


def test_a_study_of_later_seeds_repeats_their_rows(tiny_study):
    ways = {"trained": ["labels wrong 20 %"], "kinds": ["nokl"], "members": 1}
    early, late = tiny_study(**ways), tiny_study(**ways, first_seed=2, num_seeds=2)
    assert {row["seed"] for row in late} == {2, 3}
    nll = [{row["series"]: row["nll"] for row in rows if row["seed"] == 2} for rows in (early, late)]
    # other seeds train beside it, which changes the order of sums
    assert nll[0] == pytest.approx(nll[1], abs=1e-5)


def test_a_study_without_an_ending_takes_the_plain_configs(tiny_study, monkeypatch):
    asked, tiny = [], robustness.load_config
    monkeypatch.setattr(robustness, "load_config", lambda name: asked.append(name) or tiny(f"{name}-tuned"))
    tiny_study(trained=["labels wrong 20 %"], kinds=["soft"], members=1, ending="", num_seeds=1)
    assert asked == ["generated-soft"]


def test_study_stops_before_its_limit(tiny_study):
    rows = tiny_study(trained=["labels wrong 20 %", "a quarter of the labels"], members=1, limit=1e-3)
    assert {row["trained"] for row in rows} == {"labels wrong 20 %"}
    with pytest.raises(ValueError, match="trained has 'upside down'; allowed: clean"):
        tiny_study(trained=["upside down"])
    with pytest.raises(ValueError, match="kinds has 'hard'; allowed: soft, dropout, nokl, wc"):
        tiny_study(trained=["clean"], kinds=["hard"])
    with pytest.raises(ValueError, match="num_seeds, members are 3, 0; allowed"):
        tiny_study(trained=["clean"], members=0)


def test_holm_corrects_step_by_step():
    # 3 × 0.01, 2 × 0.02, and the last not below the one before it
    assert compare.holm([0.02, 0.01, 0.03]) == pytest.approx([0.04, 0.03, 0.04])
    assert compare.holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])


def test_a_variant_wins_only_against_both_baselines(tmp_path):
    path = tmp_path / "chosen.json"
    path.write_text(json.dumps({"d": {"nokl": {"method": "all"}, "wc": {"method": "mean"}}}), encoding="utf-8")
    chosen = compare.read_chosen(path)
    assert chosen == {"d": ["nokl", "wc-mean"]}
    # NOKL is far above soft and level with MC dropout
    levels = {"soft": 0.70, "dropout": 0.75, "nokl": 0.75, "wc-mean": 0.80}
    rows = [
        {**dict.fromkeys(robustness.MEASURES), "dataset": "d", "situation": "clean", "series": series, "seed": seed}
        | {"accuracy": level + 0.001 * ((seed * factor) % 7)}
        for factor, (series, level) in enumerate(levels.items(), start=1)
        for seed in range(8)
    ]
    comparisons = compare.compare(rows, chosen)
    assert len(comparisons) == 4
    assert [group[0].series for group in compare.wins(comparisons)] == ["wc-mean"]
    assert compare.wins(comparisons, better=False) == []
    assert "| d | clean | accuracy | BAM-WC, mean | +0.1" in compare.win_table(compare.wins(comparisons))


def test_demo_prints_one_row_per_attention_and_prediction(tmp_path):
    console = Console(width=80, record=True, file=io.StringIO())
    page = demo.run_demo(tmp_path, num_seeds=2, num_samples=2, epochs=2, console=console)
    text = console.export_text()
    assert page.exists()
    assert all(name in text for name in ("soft, no draws", "soft, MC dropout", "BAM-WC, no draws", "BAM-WC, draws"))
    # no cell is cut off at eighty columns
    assert "…" not in text


# two processes


def _train_in_process(rank: int, port: str, folder: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(1)
    from bayesattn_recipes.common.loop import train

    settings = [*TINY, "training.batch_size=250", "prior_scope=neighbourhood", "fanout=3"]
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
