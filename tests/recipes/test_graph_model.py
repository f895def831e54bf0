"""The graph attention network: PyG's GAT with sampled weights, parts of a graph, batches that add up."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.nn import GATConv

from bayesattn import record_kl
from bayesattn.integrations.pyg import neighbor_batch
from bayesattn_recipes.common.loop import train
from bayesattn_recipes.graph.config import CONFIGS
from bayesattn_recipes.graph.data import load_graph
from bayesattn_recipes.graph.experiment import BatchExperiment, GraphExperiment, epochs_since_progress
from bayesattn_recipes.graph.generated import generate_graph
from bayesattn_recipes.graph.inputs import neighborhood, whole_graph
from bayesattn_recipes.graph.model import GraphAttentionNetwork
from bayesattn_recipes.graph.reproduce import DATASETS, VARIANTS
from bayesattn_recipes.graph.train import fit, load_config
from data import shared_data
from helpers import number

SMALL = ["dataset=generated", "num_heads=3", "head_dim=5", "output_heads=2", "training.epochs=6"]
VARIANT_CONFIGS = [f"cora-{variant}" for variant in VARIANTS]


@pytest.fixture(scope="module")
def graph():
    return generate_graph(97, 3, 50, num_train=19, num_validation=23, seed=1)


def _double(model, inputs):
    return model.double(), inputs._replace(x=inputs.x.double())


# architecture


@pytest.mark.skipif(shared_data() is None, reason="needs the Planetoid files")
@pytest.mark.parametrize(("name", "own", "prior"), [("cora", 92373, 98), ("citeseer", 237586, 97), ("pubmed", 33779, 616)])
def test_parameters_are_counted(name, own, prior):
    graph = load_graph(name, shared_data())
    for variant in VARIANTS:
        model = GraphAttentionNetwork(load_config(f"{name}-{variant}"), graph)
        expected = own + (prior if variant in ("lc", "wc") else 0)
        assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_network_in_eval_mode_is_pygs_gat(graph):
    model = GraphAttentionNetwork(load_config("cora-wc", SMALL), graph).eval()
    hidden, output = GATConv(50, 5, heads=3), GATConv(15, 3, heads=2, concat=False)
    for ours, theirs in ((model.hidden, hidden), (model.output, output)):
        theirs.load_state_dict({name: value for name, value in ours.state_dict().items() if "bayes" not in name})
    source, target = graph.edge_index
    plain = graph.edge_index[:, source != target]
    expected = output(F.elu(hidden(graph.features, plain)), plain)
    inputs = whole_graph(graph)
    assert inputs.x.layout is torch.sparse_csr
    # float32 sums over a dozen edges
    assert torch.allclose(model(*inputs), expected, atol=1e-6)


def test_dropout_is_in_three_places_of_each_layer(graph):
    model = GraphAttentionNetwork(load_config("cora-soft", SMALL), graph)
    assert [(layer.dropout, layer.value_dropout) for layer in (model.hidden, model.output)] == [(0.6, 0.6)] * 2
    seen = []
    for layer in (model.hidden, model.output):
        layer.register_forward_hook(lambda layer, arguments, output: seen.extend([arguments[0], output]))
    model.train()(*whole_graph(graph))
    features, hidden_output, hidden, _ = seen
    for before, after in ((whole_graph(graph).x.values(), features.values()), (F.elu(hidden_output), hidden)):
        before, after = before[before != 0], after[before != 0]
        error = (0.6 * 0.4 / before.numel()) ** 0.5
        assert abs(float((after == 0).double().mean()) - 0.6) < 5 * error
        # 1/(1 − 0.6)
        assert torch.allclose(after[after != 0], 2.5 * before[after != 0])


def test_sparse_and_dense_features_give_the_same_network(graph):
    model, inputs = _double(GraphAttentionNetwork(load_config("cora-wc", [*SMALL, "dropout=0"]), graph), whole_graph(graph))
    results = []
    for x in (inputs.x, graph.features.double()):
        torch.manual_seed(0)
        with record_kl() as kl:
            logits = model.train()(*inputs._replace(x=x))
        gradients = torch.autograd.grad(logits.square().sum() + 0.01 * kl.total(), list(model.parameters()))
        results.append([logits, *gradients])
    for ours, theirs in zip(*results, strict=True):
        # float64; gradients that cancel leave rounding errors
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(shared_data() is None, reason="needs the Planetoid files")
@pytest.mark.parametrize("name", DATASETS)
def test_kl_of_the_papers_configs_is_the_mean_over_the_entries_of_both_layers(name):
    graph = load_graph(name, shared_data())
    for variant in ("lf", "lc", "wf", "wc"):
        config = load_config(f"{name}-{variant}")
        assert config.attention.kl_reduction == "sum"
        entries = graph.edge_index.shape[1] * (config.num_heads + config.output_heads)
        # the loop divides by the labels, the authors' code does not; written with seven digits
        assert config.training.kl_schedule.final == pytest.approx(len(graph.splits["train"]) / entries, rel=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", VARIANT_CONFIGS)
def test_network_on_a_gpu_has_the_logits_and_gradients_of_the_cpu(graph, name):
    model, inputs = GraphAttentionNetwork(load_config(name, SMALL), graph).eval(), whole_graph(graph)
    results = []
    for network, read in ((model, inputs), (deepcopy(model).cuda(), inputs.to("cuda"))):
        logits = network(*read)
        logits.square().sum().backward()
        results.append([logits.cpu(), *(p.grad.cpu() for p in network.parameters() if p.grad is not None)])
    for ours, reference in zip(*results, strict=True):
        # float32, sums of a few hundred terms in another order
        assert torch.allclose(ours, reference, rtol=1e-3, atol=1e-4 * float(reference.detach().abs().max()))


# which epoch is kept


def test_parameters_kept_are_those_of_the_kept_epoch(graph):
    settings = ["training.epochs=15", "learning_rate=0.05", "training.patience=3"]
    model, log = fit(load_config("cora-soft", [*SMALL, *settings]), graph)
    nodes = graph.splits["validation"]
    with torch.no_grad():
        nll = F.cross_entropy(model(*neighborhood(graph, nodes))[: len(nodes)], graph.labels[nodes])
    kept = [row for row in log.rows if row["is_best"]][-1]
    assert float(nll) == pytest.approx(kept["validation_nll"], rel=1e-5)


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


# parts of a graph


@pytest.mark.parametrize("name", ["cora-soft", "cora-wc"])
def test_neighborhoods_give_the_logits_of_the_whole_graph(graph, name):
    model, whole = _double(GraphAttentionNetwork(load_config(name, SMALL), graph), whole_graph(graph))
    model.eval()
    nodes = torch.tensor([41, 3, 96, 7])
    part = neighborhood(graph, nodes)
    assert part.x.shape[0] < graph.num_nodes
    found = model(*part._replace(x=part.x.double()))[:4]
    assert torch.allclose(found, model(*whole)[nodes], atol=1e-13)


def test_step_without_a_kl_has_the_loss_and_gradient_of_the_whole_graph(graph):
    experiment = GraphExperiment(load_config("cora-soft", [*SMALL, "dropout=0"]), graph)
    batch, model = experiment.collate(torch.zeros(1, dtype=torch.int64)), experiment.model
    assert experiment.num_labels(batch) == 19
    nodes = graph.splits["train"]
    whole = {"labels": batch["labels"], "rows": nodes, **whole_graph(graph)._asdict()}
    results = [experiment.nll(model, one) for one in (batch, whole)]
    # float32 sums over neighborhoods
    assert torch.allclose(*results, rtol=1e-5)
    for ours, theirs in zip(*(torch.autograd.grad(loss, list(model.parameters())) for loss in results), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", ["sum", "row_mean", "mean"])
@pytest.mark.parametrize("name", ["cora-wc", "cora-lf"])
def test_mean_loss_of_the_batches_is_the_loss_of_the_graph(graph, name, reduction):
    settings = [*SMALL, "prior_scope=neighborhood", f"attention.kl_reduction={reduction}", "attention.gamma_beta=0.3"]
    experiment = BatchExperiment(load_config(name, [*settings, "training.batch_size=20"]), graph)
    model = experiment.model.double().eval()

    def loss(run, batch):
        batch["x"] = batch["x"].double()
        with record_kl() as kl:
            nll = run(model, batch)
        return torch.stack([nll, kl.total()]).detach()

    order = torch.randperm(97, generator=torch.Generator().manual_seed(0))
    parts = [experiment.collate(nodes) for nodes in order.split(20)]
    # the loop weighs NLL and KL of a step by its examples, and divides both by the labels of all of them
    sizes = torch.tensor([[part["batch_size"]] for part in parts], dtype=torch.float64)
    found = torch.stack([loss(experiment.nll, part) for part in parts])
    labels = sum(experiment.num_labels(part) for part in parts)
    nll, kl = found[:, 0].sum() / labels, (found[:, 1:] * sizes).sum() / sizes.sum()
    whole = GraphExperiment(load_config(name, settings), graph)
    whole.model = model
    expected = loss(whole.nll, whole.collate(torch.zeros(1, dtype=torch.int64)))
    assert number(nll) == pytest.approx(number(expected[0]) / 19, rel=1e-10)
    # the core's log-gamma function is good to 1e-9 in float64
    assert number(kl) == pytest.approx(number(expected[1]), rel=1e-8)


def test_fanout_keeps_the_self_loop_and_so_many_neighbors(graph):
    nodes = torch.arange(30)
    part = neighborhood(graph, nodes, fanout=2, generator=torch.Generator().manual_seed(0))
    source, target = part.output_edge_index
    degree = torch.bincount(target, minlength=30)
    assert torch.equal(degree, torch.bincount(graph.edge_index[1], minlength=97)[:30].clamp(max=3))
    assert int((source == target).sum()) == 30
    # the first layer has the edges of everyone whom the second one hears
    assert set(source.tolist()) == set(part.edge_index[1].tolist())
    with pytest.raises(ValueError, match="fanout must be an integer of at least 1, or None, got 0"):
        neighborhood(graph, nodes, fanout=0)


def test_dense_features_stay_dense(graph):
    from bayesattn_recipes.graph.evaluate import add_feature_noise

    inputs = whole_graph(add_feature_noise(graph, 1.0))
    assert inputs.x.layout is torch.strided
    GraphAttentionNetwork(load_config("cora-wc", SMALL), graph).train()(*inputs).sum().backward()


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
        [*SMALL, "training.batch_size=20", "training.epochs=8", "fanout=4", "prior_scope=neighborhood",
         "learning_rate=0.05", "dropout=0.2", "training.patience=null"],
    )  # fmt: skip
    torch.manual_seed(0)
    rows = train(BatchExperiment(config, graph), config.training, seed=0).rows
    assert rows[-1]["step"] == 8 * 5
    assert rows[-1]["train_nll"] < 0.8 * rows[0]["train_nll"]


def test_layers_know_of_no_batch_after_a_step(graph):
    config = load_config("cora-wf", [*SMALL, "training.batch_size=20"])
    experiment = BatchExperiment(config, graph)
    experiment.nll(experiment.model, experiment.collate(torch.arange(20)))
    assert experiment.model.hidden.seed_rows is None
    with neighbor_batch(experiment.model, batch_size=1, num_nodes=97):
        assert experiment.model.hidden.seed_rows is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["training.batch_size=20"], "prior_scope must be 'neighborhood' in batches, got 'graph'"),
        (["training.batch_size=2", "prior_scope=neighborhood"], "batch_size must be 1, or at least 6 .*, got 2"),
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
    assert by_set.keys() == {"cora", "citeseer", "pubmed"}
    assert all(kinds == {"soft", "nokl", "wc"} for kinds in by_set.values())
    for name in names:
        dataset, kind, _ = name.split("-")
        config = load_config(name)
        assert config.dataset.startswith(dataset)
        assert config.attention.variant == {"nokl": "BAM-NOKL", "wc": "BAM-WC"}.get(kind, "soft")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("dropout=1", "dropout must be below 1, got 1"),
        ("num_heads=0", "num_heads must be at least 1, got 0"),
        ("learning_rate=0", "learning_rate must be above 0, got 0"),
        ("weight_decay=-1", "weight_decay must be at least 0.*, got -1"),
        ("prior_scope=world", "prior_scope must be one of 'graph', 'neighborhood', got 'world'"),
    ],
)
def test_bad_settings_are_named(setting, message):
    with pytest.raises(ValueError, match=message):
        load_config("cora-soft", [setting])
