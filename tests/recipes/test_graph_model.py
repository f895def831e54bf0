"""The graph attention network: the published architecture, copies that are runs of their own, batches that add up."""

import dataclasses
import math
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GATConv

from bayesattn import AttentionConfig, record_kl
from bayesattn_recipes.graph.data import load_graph
from bayesattn_recipes.graph.features import SparseFeatures
from bayesattn_recipes.graph.generated import generate_graph
from bayesattn_recipes.graph.inputs import GraphInputs
from bayesattn_recipes.graph.layer import CopySettings
from bayesattn_recipes.graph.many import build_many, fit_many, train_many
from bayesattn_recipes.graph.model import GraphAttentionNetwork, take_copies
from bayesattn_recipes.graph.reproduce import DATASETS, VARIANTS
from bayesattn_recipes.graph.sampling import neighbourhood_inputs
from bayesattn_recipes.graph.train import (
    CONFIGS,
    BatchExperiment,
    GraphExperiment,
    build_model,
    epochs_since_progress,
    fit,
    load_config,
)
from data import shared_data
from helpers import number

SMALL = ["dataset=generated", "num_heads=3", "head_dim=5", "output_heads=2", "training.epochs=6"]
VARIANT_CONFIGS = [f"cora-{variant}" for variant in VARIANTS]


@pytest.fixture(scope="module")
def graph():
    return generate_graph(97, 3, 50, num_train=19, num_validation=23, seed=1)


def _double(model, inputs):
    return model.double(), inputs.to("cpu", torch.float64)


# architecture


@pytest.mark.skipif(shared_data() is None, reason="needs the Planetoid files")
@pytest.mark.parametrize(("name", "own", "prior"), [("cora", 92391, 98), ("citeseer", 237604, 97), ("pubmed", 33832, 616)])
def test_parameters_are_counted_as_in_the_paper(name, own, prior):
    graph = load_graph(name, shared_data())
    for variant in VARIANTS:
        model = build_model(load_config(f"{name}-{variant}"), graph)
        expected = own + (prior if variant in ("lc", "wc") else 0)
        assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_network_without_score_biases_is_pygs_gat(graph):
    config = load_config("cora-soft", SMALL)
    model, inputs = _double(build_model(config, graph), GraphInputs.of(graph))
    model.eval()
    hidden, output = GATConv(50, 5, heads=3).double(), GATConv(15, 3, heads=2, concat=False).double()
    for ours, theirs in ((model.hidden, hidden), (model.output, output)):
        with torch.no_grad():
            theirs.lin.weight.copy_(ours.weight.transpose(1, 2).flatten(0, 1))
            theirs.att_src.copy_(ours.score_source)
            theirs.att_dst.copy_(ours.score_target)
            nn.init.normal_(ours.bias)
            theirs.bias.copy_(ours.bias.flatten() if theirs.concat else ours.bias.mean(dim=0))
    source, target = graph.edge_index
    plain = torch.stack([source, target])[:, source != target]
    expected = output(F.elu(hidden(graph.features.double(), plain)), plain)
    # float64 sums over a dozen edges
    assert torch.allclose(model(inputs)[0], expected, atol=1e-12)


def test_score_biases_act_inside_the_leaky_relu(graph):
    model, inputs = _double(build_model(load_config("cora-soft", SMALL), graph), GraphInputs.of(graph))
    model.eval()
    before = model(inputs)
    with torch.no_grad():
        model.hidden.score_bias[:, 0] = 3.0
    shifted = model(inputs)
    with torch.no_grad():
        model.hidden.score_bias[:, 0], model.hidden.score_bias[:, 1] = 1.0, 2.0
    assert not torch.allclose(before, shifted)
    # only their sum matters
    assert torch.allclose(model(inputs), shifted, atol=1e-12)


def test_dropout_is_in_three_places_and_new_for_every_head(graph):
    model = build_model(load_config("cora-soft", SMALL), graph)
    layer = model.hidden
    dropped = []
    plain = layer._drop

    def spy(x, **options):
        result = plain(x, **options)
        dropped.append(result)
        return result

    layer._drop = spy
    layer.train()
    layer(SparseFeatures.of(graph.features), GraphInputs.of(graph).edges[0])
    features, weights, values = dropped
    for part, heads in ((features, 0), (weights, 1), (values, 1)):
        share = (part == 0).double().mean()
        error = (0.6 * 0.4 / part.numel()) ** 0.5
        assert abs(float(share) - 0.6) < 5 * error
        assert not torch.equal(part.select(heads, 0) == 0, part.select(heads, 1) == 0)
    kept = features[features != 0] / SparseFeatures.of(graph.features).values.expand_as(features)[features != 0]
    # 1/(1 − 0.6), with 0.6 rounded to a multiple of 2^-16
    assert (kept - 2.5).abs().max() < 1e-3


def test_projection_of_sparse_features_is_the_dense_product_with_its_gradient(graph):
    features = SparseFeatures.of(graph.features.double())
    weight = torch.randn(4, 50, 3, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(4, len(features.values), dtype=torch.float64)
    rows, columns = graph.features.nonzero(as_tuple=True)
    dense = torch.zeros(4, 97, 50, dtype=torch.float64)
    dense[:, rows, columns] = features.values * scale
    found, expected = features.project(features.values * scale, weight), torch.einsum("gnf,gfd->ngd", dense, weight)
    assert torch.allclose(found, expected, atol=1e-13)
    direction = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad(x, weight, direction)[0] for x in (found, expected))
    assert torch.allclose(ours, theirs, atol=1e-13)
    shared = torch.einsum("nf,gfd->ngd", graph.features.double(), weight)
    assert torch.allclose(features.project(features.values, weight), shared, atol=1e-13)
    ours, theirs = (
        torch.autograd.grad(x, weight, direction)[0] for x in (features.project(features.values, weight), shared)
    )
    assert torch.allclose(ours, theirs, atol=1e-13)


def test_contextual_prior_shared_by_heads_is_refused(graph):
    with pytest.raises(ValueError, match="prior_per_head is False; allowed in the graph recipe: True"):
        build_model(load_config("cora-wc", [*SMALL, "attention.prior_per_head=false"]), graph)


def test_mean_reduction_averages_over_the_heads_of_both_layers(graph):
    model, inputs = _double(build_model(load_config("cora-wf", SMALL), graph), GraphInputs.of(graph))
    model.eval()
    with record_kl(model) as mean:
        model(inputs)
    for layer in (model.hidden, model.output):
        layer.config = dataclasses.replace(layer.config, kl_reduction="sum")
        layer.kl_share = 1.0
    with record_kl(model) as total:
        model(inputs)
    entries = inputs.edges[0].source.shape[0] * (3 + 2)
    assert number(mean.total()) == pytest.approx(number(total.total()) / entries, rel=1e-12)


# many seeds side by side


@pytest.mark.parametrize("name", VARIANT_CONFIGS)
def test_copies_are_the_runs_of_their_seeds(graph, name):
    config = load_config(name, [*SMALL, "attention.gamma_beta=0.3", "attention.sigma_q=0.5", "attention.sigma_p=2"])
    seeds = [5, 2, 11]

    def in_double(seeds):
        return fit_many(build_many(config, graph, seeds).double(), config, graph, seeds)

    together, alone = in_double(seeds), [in_double([seed]) for seed in seeds]
    for copy, run in enumerate(alone):
        own = take_copies(together.model.state_dict(), torch.tensor([copy]), len(seeds))
        for key, value in run.model.state_dict().items():
            # the softmax of the prior cancels its last bias: a gradient of rounding errors, which Adam makes steps of
            if key.endswith("bias_out"):
                continue
            # float64, six steps of Adam, whose first steps divide tiny gradients by their own size
            assert torch.allclose(own[key], value, rtol=1e-7, atol=1e-9), key
        assert torch.equal(run.kept_epoch, together.kept_epoch[[copy]])


@pytest.mark.parametrize("name", ["cora-soft", "cora-wf"])
def test_copies_are_the_runs_of_the_loop(graph, name):
    config = load_config(name, [*SMALL, "training.epochs=12", "training.patience=3", "learning_rate=0.05"])
    together = train_many(config, graph, [3, 7])
    for copy, seed in enumerate((3, 7)):
        model, log = fit(dataclasses.replace(config, seed=seed), graph)
        own = take_copies(together.model.state_dict(), torch.tensor([copy]), 2)
        assert int(together.num_epochs[copy]) == len(log.rows)
        assert int(together.kept_epoch[copy]) == max(i for i, row in enumerate(log.rows) if row["is_best"])
        for key, value in model.state_dict().items():
            # float32: products of two copies and of one may sum in another order
            assert torch.allclose(own[key], value, rtol=1e-3, atol=1e-4), key


def test_copies_do_not_depend_on_each_other(graph):
    config = load_config("cora-nokl", SMALL)
    first, second = (train_many(config, graph, seeds).validation_nll[:, 0] for seeds in ([4, 1], [4, 9]))
    # float32, sums of the same numbers in the same order
    assert torch.allclose(first, second, atol=1e-6)


def test_parameters_kept_are_those_of_the_kept_epoch(graph):
    config = load_config("cora-soft", [*SMALL, "training.epochs=15", "learning_rate=0.05", "training.patience=3"])
    runs = train_many(config, graph, [0, 1, 2])
    nodes = graph.splits["validation"]
    with torch.no_grad():
        logits = runs.model(neighbourhood_inputs(GraphInputs.of(graph), nodes))
    for copy in range(3):
        nll = F.cross_entropy(logits[copy], graph.labels[nodes])
        assert float(nll) == pytest.approx(float(runs.validation_nll[runs.kept_epoch[copy], copy]), rel=1e-5)


def test_both_criteria_decide_what_is_kept_and_either_goes_on(graph):
    rows = [(1.0, 0.5), (0.9, 0.4), (0.8, 0.6), (0.9, 0.6), (0.9, 0.5), (0.9, 0.5)]
    rows = [{"validation_nll": nll, "validation_accuracy": accuracy} for nll, accuracy in rows]
    config = load_config("cora-soft", SMALL)
    experiment = GraphExperiment(config, graph)
    kept = [experiment.is_better(row, None, config.training) for row in rows]
    # row 1 improves the NLL alone, row 3 ties the accuracy alone: neither is kept, both reset the patience
    assert kept == [True, False, True, False, False, False]
    assert [epochs_since_progress(rows[: stop + 1]) for stop in range(6)] == [0, 0, 0, 0, 1, 2]
    # row 1 is kept where the NLL alone decides
    experiment = GraphExperiment(load_config("cora-soft", [*SMALL, "kept_by=nll"]), graph)
    assert [experiment.is_better(row, None, config.training) for row in rows] == [True, True, True, False, False, False]


def test_copies_keep_the_epoch_of_the_lowest_nll_where_it_alone_decides(graph):
    config = load_config("cora-soft", [*SMALL, "training.epochs=15", "learning_rate=0.05", "kept_by=nll"])
    runs = train_many(config, graph, [0, 1, 2])
    assert runs.kept_epoch.tolist() == runs.validation_nll.argmin(dim=0).tolist()


@pytest.mark.parametrize("name", ["cora-soft", "cora-nokl", "cora-lc", "cora-wc"])
def test_copies_with_settings_and_splits_of_their_own_are_the_runs_of_these(graph, name):
    first = load_config(name, [*SMALL, "attention.gamma_beta=0.3", "attention.sigma_q=0.5", "attention.sigma_p=2"])
    changes = ["dropout=0.2", "weight_decay=0.01", "training.kl_schedule.final=9", "attention.sigma_q=0.8"]
    second = load_config(name, [*SMALL, *changes, "attention.weibull_k=3", "attention.gamma_beta=0.7"])
    # another split, one node smaller, and other labels
    train, rest = graph.splits["validation"][1:], graph.splits["train"]
    labels = (graph.labels + 1) % 3
    other = dataclasses.replace(graph, labels=labels, splits={**graph.splits, "train": train, "validation": rest})
    # without a KL a step reads the neighbourhoods of all copies' labels: the same distribution, but other draws
    jobs = [(first, graph, 5), (second, other if first.attention.has_kl else graph, 2), (second, graph, 11)]

    def in_double(jobs):
        configs, graphs, seeds = (list(part) for part in zip(*jobs, strict=True))
        return fit_many(build_many(configs, graph, seeds).double(), configs, graphs, seeds)

    together, alone = in_double(jobs), [in_double([job]) for job in jobs]
    for copy, run in enumerate(alone):
        own = take_copies(together.model.state_dict(), torch.tensor([copy]), len(jobs))
        for key, value in run.model.state_dict().items():
            # as above
            if not key.endswith("bias_out"):
                assert torch.allclose(own[key], value, rtol=1e-7, atol=1e-9), key
        assert torch.allclose(run.validation_nll[:, 0], together.validation_nll[:, copy], rtol=1e-9)


def test_shared_noise_has_each_copys_size(graph):
    layer = GraphAttentionNetwork(50, 3, load_config("cora-nokl").attention, num_copies=2).hidden
    settings = [CopySettings(AttentionConfig("BAM-NOKL", weibull_k=k), p) for k, p in ((2.0, 0.25), (0.5, 0.0))]
    layer.settings, layer.generators = settings, [torch.Generator().manual_seed(0)]
    layer.dropout.train()
    drawn = layer._log_noise(torch.zeros(20_000, 16)).unflatten(1, (2, 8))
    # ln E has standard deviation π / √6; 160,000 draws with kurtosis 5.4 know theirs to a relative 0.0026
    for copy, k in enumerate((2.0, 0.5)):
        assert float(drawn[:, copy].std()) == pytest.approx(math.pi / math.sqrt(6) / k, rel=0.013)
    kept = layer._drop(torch.ones(20_000, 16)).unflatten(1, (2, 8))
    # 160,000 draws: five standard errors are 0.0054 of a share of 3/4; what is kept is scaled by 4/3
    assert float((kept[:, 0] != 0).float().mean()) == pytest.approx(0.75, abs=0.0054)
    assert float(kept[:, 0].max()) == pytest.approx(4 / 3)
    assert bool((kept[:, 1] == 1.0).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", VARIANT_CONFIGS)
def test_network_on_a_gpu_has_the_logits_and_gradients_of_the_cpu(graph, name):
    model, inputs = build_model(load_config(name, SMALL), graph, num_copies=2).eval(), GraphInputs.of(graph)
    on_gpu = deepcopy(model).cuda()
    results = []
    for network, read in ((model, inputs), (on_gpu, inputs.to("cuda"))):
        logits = network(read)
        logits.square().sum().backward()
        results.append([logits.cpu(), *(p.grad.cpu() for p in network.parameters() if p.grad is not None)])
    for ours, reference in zip(*results, strict=True):
        # float32, sums of a few hundred terms in another order
        assert torch.allclose(ours, reference, rtol=1e-3, atol=1e-4 * float(reference.detach().abs().max()))


@pytest.mark.parametrize("name", ["cora-soft", "cora-wc"])
def test_copies_that_share_their_noise_learn(graph, name):
    changes = ([], ["dropout=0", "attention.weibull_k=3"])
    configs = [load_config(name, [*SMALL, "training.epochs=40", "learning_rate=0.05", *own]) for own in changes]
    runs = train_many(configs, graph, [0, 1], shares_noise=True)
    assert bool((runs.validation_nll.min(dim=0).values < runs.validation_nll[0]).all())


def test_copies_that_differ_in_shape_are_refused(graph):
    configs = [load_config("cora-soft", [*SMALL, f"learning_rate={rate}"]) for rate in (0.01, 0.02)]
    with pytest.raises(ValueError, match="configs differ in more than dropout"):
        train_many(configs, graph, [0, 1])
    with pytest.raises(ValueError, match="config has 2 entries; allowed: 3"):
        train_many(configs, graph, [0, 1, 2])


def test_seeds_are_needed(graph):
    with pytest.raises(ValueError, match="seeds is empty"):
        train_many(load_config("cora-soft", SMALL), graph, [])


# parts of a graph


@pytest.mark.parametrize("name", ["cora-soft", "cora-wc"])
def test_neighbourhoods_give_the_logits_of_the_whole_graph(graph, name):
    model, inputs = _double(build_model(load_config(name, SMALL), graph), GraphInputs.of(graph))
    model.eval()
    nodes = torch.tensor([41, 3, 96, 7])
    assert torch.allclose(model(neighbourhood_inputs(inputs, nodes)), model(inputs)[:, nodes], atol=1e-13)


@pytest.mark.parametrize("reduction", ["sum", "row_mean", "mean"])
@pytest.mark.parametrize("name", ["cora-wc", "cora-lf"])
def test_mean_kl_of_the_batches_is_the_kl_of_the_graph(graph, name, reduction):
    settings = [*SMALL, "prior_scope=neighbourhood", f"attention.kl_reduction={reduction}", "attention.gamma_beta=0.3"]
    model, inputs = _double(build_model(load_config(name, settings), graph), GraphInputs.of(graph))
    model.eval()

    def kl(part):
        with record_kl() as scope:
            model(part)
        return number(scope.total())

    order = torch.randperm(97, generator=torch.Generator().manual_seed(0))
    parts = [neighbourhood_inputs(inputs, nodes) for nodes in order.split(20)]
    # the loop weighs the KL of an example by the examples of the step
    estimate = sum(kl(part) * part.batch.num_nodes for part in parts if part.batch is not None)
    # the core's log-gamma function is good to 1e-9 in float64
    assert estimate == pytest.approx(kl(inputs), rel=1e-8)


def test_fanout_keeps_the_self_loop_and_so_many_neighbours(graph):
    whole = GraphInputs.of(graph)
    nodes = torch.arange(30)
    part = neighbourhood_inputs(whole, nodes, fanout=2, generator=torch.Generator().manual_seed(0))
    degree = torch.bincount(part.edges[1].target, minlength=30)
    assert torch.equal(degree, torch.bincount(whole.edges[1].target, minlength=97)[:30].clamp(max=3))
    loops = part.edges[1].source == part.edges[1].target
    assert int(loops.sum()) == 30
    with pytest.raises(ValueError, match="fanout is 0; allowed"):
        neighbourhood_inputs(whole, nodes, fanout=0)


def test_batches_hold_every_node_once_and_share_the_labels(graph):
    config = load_config("cora-wf", [*SMALL, "training.batch_size=20", "fanout=3"])
    experiment = BatchExperiment(config, graph)
    batches = experiment.batches(config.training, torch.Generator().manual_seed(0))
    assert sorted(torch.cat(list(batches)).tolist()) == list(range(97))
    # 19 labels in five batches
    assert sorted(len(experiment.collate(nodes)["labels"]) for nodes in batches) == [3, 4, 4, 4, 4]


def test_training_in_batches_learns(graph):
    config = load_config(
        "cora-wc",
        [*SMALL, "training.batch_size=20", "training.epochs=8", "fanout=4", "prior_scope=neighbourhood",
         "learning_rate=0.05", "dropout=0.2", "training.patience=null"],
    )  # fmt: skip
    from bayesattn_recipes.common.loop import train

    experiment = BatchExperiment(config, graph)
    rows = train(experiment, config.training, seed=0).rows
    assert rows[-1]["step"] == 8 * 5
    assert rows[-1]["train_nll"] < 0.8 * rows[0]["train_nll"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["training.batch_size=20"], "prior_scope is 'graph', which a batch does not see"),
        (["training.batch_size=2", "prior_scope=neighbourhood"], "batch_size is 2; allowed: 1, or 6 and more"),
    ],
)
def test_batches_that_cannot_be_are_refused(graph, settings, message):
    with pytest.raises(ValueError, match=message):
        BatchExperiment(load_config("cora-wc", [*SMALL, *settings]), graph)


# configs


@pytest.mark.parametrize("dataset", DATASETS)
def test_every_row_of_the_table_has_its_config(dataset):
    for variant in VARIANTS:
        config = load_config(f"{dataset}-{variant}")
        assert config.dataset == dataset
        assert config.attention.variant == {"soft": "soft"}.get(variant, f"BAM-{variant.upper()}")
        assert (config.training.epochs, config.training.patience) == (400, 100)


def test_tuned_configs_are_complete():
    names = [path.stem for path in CONFIGS.glob("*-tuned.yaml")]
    by_set = {
        name.split("-")[0]: {other.split("-")[1] for other in names if other.startswith(name.split("-")[0])}
        for name in names
    }
    assert {"cora", "citeseer", "pubmed", "chameleon"} <= by_set.keys()
    assert all(kinds == {"soft", "dropout", "nokl", "wc"} for kinds in by_set.values())
    for name in names:
        dataset, kind, _ = name.split("-")
        config = load_config(name)
        assert config.dataset.startswith(dataset)
        assert config.attention.variant == {"nokl": "BAM-NOKL", "wc": "BAM-WC"}.get(kind, "soft")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("dropout=1", "dropout is 1.0; allowed"),
        ("num_heads=0", "num_heads is 0; allowed"),
        ("learning_rate=0", "learning_rate is 0.0; allowed"),
        ("weight_decay=-1", "weight_decay is -1.0; allowed"),
        ("prior_scope=world", "prior_scope is 'world'; allowed: 'graph', 'neighbourhood'"),
    ],
)
def test_bad_settings_are_named(setting, message):
    with pytest.raises(ValueError, match=message):
        load_config("cora-soft", [setting])


def test_number_of_generators_is_checked(graph):
    model = GraphAttentionNetwork(50, 3, load_config("cora-soft").attention, num_copies=3)
    with pytest.raises(ValueError, match="generators has 2 entries; allowed: 3, one for each copy, or 1"):
        model.set_generators([None, None])
    with pytest.raises(ValueError, match="settings has 0 entries; allowed: 3"):
        model.set_settings([])
