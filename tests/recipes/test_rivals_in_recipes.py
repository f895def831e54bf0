"""Every recipe takes every rival it can from its config: it trains through the recipe's own loop, and refuses the others."""

import dataclasses
import itertools
from functools import partial, partialmethod

import pytest
import torch
import torch.nn.functional as F
from language_files import sentiment_data, write_glue, write_squad

from bayesattn.cli import main
from bayesattn.files import RunError
from bayesattn_recipes.baselines import with_score_function
from bayesattn_recipes.baselines.config import IN_LAYERS
from bayesattn_recipes.baselines.rows import EdgeRows
from bayesattn_recipes.baselines.score_function import ChoosingWeights
from bayesattn_recipes.common.cells import read_cell, write_cell
from bayesattn_recipes.common.checkpoints import check_identity
from bayesattn_recipes.common.config import seed_everything
from bayesattn_recipes.common.loop import train
from bayesattn_recipes.digits import train as digits
from bayesattn_recipes.graph import evaluate as graph_evaluate
from bayesattn_recipes.graph import train as graph
from bayesattn_recipes.graph.data import make_graph
from bayesattn_recipes.language import train as language
from bayesattn_recipes.language.fit import example_losses
from bayesattn_recipes.language.tasks import find_task
from bayesattn_recipes.vqa import data as vqa_data
from bayesattn_recipes.vqa import evaluate as vqa_evaluate
from bayesattn_recipes.vqa import train as vqa

RIVALS = [variant for variant in IN_LAYERS if not variant.startswith("BAM") and variant != "soft"]
SMALL = {
    "digits": ("soft", ["training.epochs=1", "train_size=50", "width=12"]),
    "graph": ("generated-soft", ["training.epochs=3", "num_heads=2", "head_dim=3"]),
    "vqa": (
        "shapes-soft",
        ["data.train_images=11", "training.epochs=1", "training.batch_size=16", "model.width=8", "model.num_heads=2",
         "model.feedforward_dim=8", "model.word_dim=4", "model.reduction_dim=5", "model.fused_dim=6"],
    ),
    "language": ("own", ["encoder=tiny", "training.steps=3", "max_length=24", "training.batch_size=8"]),
}  # fmt: skip
MODULES = {"digits": digits, "graph": graph, "vqa": vqa, "language": language}
CASES = [
    *itertools.product(SMALL, RIVALS),
    *((recipe, "sampled-kl") for recipe in SMALL if recipe != "graph"),
]


@pytest.fixture(autouse=True)
def small_world(monkeypatch):
    monkeypatch.setattr(vqa_data, "SHAPES_TEST_IMAGES", 11)
    vqa_data._shapes.cache_clear()
    yield
    vqa_data._shapes.cache_clear()


def load(recipe, variant, *more):
    name, settings = SMALL[recipe]
    rival = ["attention.variant=BAM-WF", "attention.sampled_kl=true"] if variant == "sampled-kl" else None
    return MODULES[recipe].load_config(name, [*settings, *(rival or [f"attention.variant={variant}"]), *more])


def experiment(recipe, config):
    seed_everything(1)
    return MODULES[recipe].TRAINING.build(config, sentiment_data() if recipe == "language" else None)


@pytest.mark.filterwarnings("ignore:after epoch")
@pytest.mark.parametrize(("recipe", "variant"), CASES)
def test_every_rival_trains_through_the_loop_and_reaches_every_parameter(recipe, variant):
    config = load(recipe, variant)
    one = experiment(recipe, config)
    reached = dict.fromkeys((name for name, _ in one.model.named_parameters()), False)

    def note(name, grad):
        reached[name] |= bool(grad.any())

    for name, parameter in one.model.named_parameters():
        parameter.register_hook(partial(note, name))
    log = train(one, config.training, seed=1)
    assert all(torch.isfinite(p).all() for p in one.model.parameters())
    # uniform weights do not depend on the scores
    assert variant == "uniform" or not [name for name, is_reached in reached.items() if not is_reached]
    assert (log.rows[-1]["train_kl"] != 0.0) == config.attention.has_kl


@pytest.mark.parametrize("recipe", SMALL)
def test_soft_attention_of_a_recipe_is_what_it_was(recipe):
    one = experiment(recipe, load(recipe, "soft"))
    assert not any(getattr(module, "bayes_weights", None) is not None for module in one.model.modules())


@pytest.mark.parametrize("setting", ["attention.temperature=0.7", "attention.variant=BAM-WC"])
def test_results_of_another_rival_are_not_taken_for_this_ones(setting, tmp_path):
    values = dataclasses.asdict(load("vqa", "hard-gumbel"))
    write_cell(tmp_path / "cell.json", {"config": values}, {})
    other = {"config": dataclasses.asdict(load("vqa", "hard-gumbel", setting))}
    with pytest.raises(RunError, match="was run with other settings"):
        read_cell(tmp_path / "cell.json", other)
    with pytest.raises(RunError, match="has another config"):
        check_identity(tmp_path, {"config": values}, other)


@pytest.mark.parametrize("recipe", SMALL)
@pytest.mark.parametrize("variant", ["variational-enum", "variational-dirichlet"])
def test_latent_alignments_are_refused_by_the_config(recipe, variant):
    with pytest.raises(ValueError, match=f"variant '{variant}' needs the likelihood of the output under every"):
        load(recipe, variant)


def test_the_graph_recipe_refuses_what_it_has_no_version_of():
    with pytest.raises(ValueError, match="sampled_kl must be False on edges"):
        load("graph", "sampled-kl")
    with pytest.raises(ValueError, match="weights must have no KL in batches, got 'gaussian-context'"):
        experiment("graph", load("graph", "gaussian-context", "training.batch_size=50"))


def test_the_command_line_refuses_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as exited:
        main(["train", "vqa", "--config", "shapes-gumbel", "--out", str(tmp_path / "run"), "--set",
              "attention.variant=variational-enum"])  # fmt: skip
    assert exited.value.code == 2
    assert "variant 'variational-enum' needs the likelihood" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_nodes_in_batches_are_charged_with_their_own_neighborhoods():
    config = load("graph", "hard-reinforce", "training.batch_size=200", "training.epochs=1")
    log = train(experiment("graph", config), config.training, seed=1)
    assert log.rows[-1]["train_nll"] > 0.0


@pytest.mark.parametrize(
    ("recipe", "variant"), [("vqa", "hard-gumbel"), ("graph", "gaussian-context"), ("graph", "mc-dropout")]
)
def test_a_run_of_a_rival_is_evaluated_with_draws(recipe, variant, tmp_path):
    config = load(recipe, variant)
    MODULES[recipe].train_run(config, tmp_path / "run")
    found = {"vqa": vqa_evaluate, "graph": graph_evaluate}[recipe].predict_run(tmp_path / "run", num_samples=2, seed=3)
    for method, samples in found.splits["test"].samples.items():
        assert torch.isfinite(samples).all()
        assert (method == "mean") == (len(samples) == 1)
        assert method == "mean" or not torch.equal(samples[0], samples[1])


@pytest.mark.parametrize("variant", ["hard-gumbel", "mc-dropout"])
def test_draws_of_a_graph_repeat_with_their_seed(variant):
    one = experiment("graph", load("graph", variant))
    method = "dropout" if variant == "mc-dropout" else "attention"
    first, again = (graph_evaluate.draw(one.model.eval(), one.inputs, method, 3, 5) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])


# whose loss a choice is charged with


@pytest.mark.parametrize("kind", ["classification", "regression", "spans"])
def test_losses_of_examples_add_up_to_the_models_own(kind, tmp_path):
    task = {"classification": "own", "regression": "stsb", "spans": "squad1"}[kind]
    folder = {"own": sentiment_data, "stsb": lambda: write_glue(tmp_path / "glue"), "squad1": lambda: write_squad(tmp_path)}
    config = language.load_config(task, ["encoder=tiny", "training.steps=1", "max_length=48"])
    one = language.LanguageExperiment(config, folder[task]())
    count = min(2, one.num_examples)
    batch = one.collate(torch.arange(count))
    if kind == "spans":
        # an answer that its window cut off has no label
        batch["end_positions"][0] = 10_000
    with torch.no_grad():
        output = one.model.eval()(**batch)
        losses = example_losses(find_task(config.task), output, batch)
    assert losses.shape == (count,)
    # of an answer's two ends transformers takes the mean of two means, here over two labels and over one
    expected = count * output.loss if kind != "spans" else None
    if expected is None:
        first = F.cross_entropy(output.start_logits, batch["start_positions"])
        last = F.cross_entropy(output.end_logits[1:], batch["end_positions"][1:])
        assert torch.allclose(output.loss, (first + last) / 2)
        expected = 2 * first + last
    assert torch.allclose(losses.sum(), expected, rtol=1e-5)


@pytest.fixture
def tiny_graph():
    """Three nodes in a row, labeled at its ends, in float64 without dropout: 48 ways to choose."""
    splits = {name: torch.tensor(nodes) for name, nodes in (("train", [0, 2]), ("validation", [1]))}
    features, ends = 1.0 + torch.rand(3, 4), torch.tensor([[0, 1], [1, 2]])
    one = make_graph("row", features, torch.tensor([0, 1, 1]), ends, splits, ["a", "b"])
    settings = ["num_heads=1", "head_dim=2", "dropout=0", "attention.variant=hard-reinforce"]
    config = graph.load_config("generated-soft", [*settings, "attention.baseline=none"])
    seed_everything(4)
    made = graph.GraphExperiment(config, one)
    made.model.double()
    made.inputs = made.inputs._replace(x=made.inputs.x.double())
    return made


def test_gradient_of_choices_on_edges_is_unbiased_and_charging_neighbors_alone_cuts_its_variance(tiny_graph, monkeypatch):
    one, batch = tiny_graph, tiny_graph.collate(torch.zeros(1, dtype=torch.long))
    parameters = list(one.model.parameters())
    noted = []
    monkeypatch.setattr(ChoosingWeights, "_choose", partialmethod(note_choice, noted))

    def whole():
        losses.append(F.cross_entropy(one.model(*one.inputs)[one.rows], batch["labels"], reduction="sum"))
        return losses[-1].view(1)

    expected, found = torch.zeros((), dtype=torch.float64), {"neighbors": [], "graph": []}
    shares, losses = [], []
    for chosen in itertools.product(*(itertools.product(*edges_of_nodes(edges)) for edges in one.inputs[1:])):
        estimators = {
            "neighbors": lambda: one.nll(one.model, batch),
            "graph": lambda: with_score_function(one.model, whole).sum(),
        }
        for name, estimator in estimators.items():
            noted.clear()
            left = iter(chosen)
            monkeypatch.setattr(EdgeRows, "largest", lambda self, x, left=left: choose(x, next(left)))
            gradient = torch.autograd.grad(estimator(), parameters, retain_graph=True)
            found[name].append(torch.cat([grad.flatten() for grad in gradient]))
        # p(z) L(z), whose sum over all z is the expected loss
        share = torch.exp(sum(noted))
        shares.append(share.detach())
        expected = expected + share * losses[-1]
    exact = torch.cat([grad.flatten() for grad in torch.autograd.grad(expected, parameters, retain_graph=True)])
    share = torch.stack(shares)
    # all there is: the rest is rounding of float64
    assert torch.allclose(share.sum(), torch.ones((), dtype=torch.float64), rtol=1e-12)
    moments = {name: torch.stack(gradients) for name, gradients in found.items()}
    for gradients in moments.values():
        assert torch.allclose(share @ gradients, exact, atol=1e-12)
    assert (share @ moments["neighbors"].square()).sum() < 0.9 * (share @ moments["graph"].square()).sum()
    # without the score function the mean would be another one
    scores = one.model.hidden.att_src
    assert torch.autograd.grad(expected, scores)[0].abs().max() > 1e-3


def note_choice(module, noted, choice):
    module.choices.append(choice())
    noted.append(module.choices[-1].log_prob.sum())


def choose(x, places):
    return torch.zeros_like(x).index_fill_(0, torch.tensor(places), 1.0)


def edges_of_nodes(edge_index):
    """The positions of the edges into each node that has some; the layer sorts them by target."""
    target = edge_index[1].sort().values
    return [torch.nonzero(target == node).flatten().tolist() for node in target.unique()]
