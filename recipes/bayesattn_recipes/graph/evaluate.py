"""Draw predictions from a trained graph attention network, and measure them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bayesattn import metrics
from bayesattn.evaluation.measure import mean_logits
from bayesattn.evaluation.runs import EdgeWeights, Predictions, SplitPredictions
from bayesattn.evaluation.threads import one_thread
from bayesattn.prediction import predict, sampling
from bayesattn.scalars import check_not_negative
from bayesattn_recipes.common.runs import choose_methods
from bayesattn_recipes.graph.config import GraphConfig
from bayesattn_recipes.graph.data import LEFT_OUT, Graph
from bayesattn_recipes.graph.inputs import Inputs, neighborhood, whole_graph
from bayesattn_recipes.graph.model import GraphAttentionNetwork
from bayesattn_recipes.graph.train import load_run


@one_thread()
def predict_run(
    folder: Path,
    *,
    num_samples: int = 20,
    noise: tuple[float, ...] = (0.5, 1.0),
    methods: Sequence[str] | None = None,
    seed: int = 0,
    data: Path | None = None,
    on_progress: Callable[[int, int], Any] = lambda done, total: None,
) -> Predictions:
    """Predict the validation and test nodes of a run with every method.

    Args:
        folder: The run.
        num_samples: M, at least 2.
        noise: Strengths of feature noise; the test nodes are predicted again with each.
        methods: What is drawn: nothing (`mean`), the `attention` weights of a Bayesian network, alone or with its dropout
            masks (`attention+dropout`), or the `dropout` masks of a soft one. None takes `mean` and the first of these.
        seed: Seed of the draws.
        data: Folder of the data sets; None takes that of the environment variable BAYESATTN_DATA.
        on_progress: Called with the number of splits and methods done and to do, for a progress bar.
    """
    config, model, graph = load_run(folder, data)
    methods = choose_methods(methods, available_methods(config), num_samples, config.attention.variant)
    places = {name: (graph, graph.splits[name]) for name in ("validation", "test")}
    for strength in noise:
        if strength:
            places[f"noise-{strength:g}"] = (add_feature_noise(graph, strength), graph.splits["test"])
    if LEFT_OUT in graph.splits:
        places[LEFT_OUT] = (graph, graph.splits[LEFT_OUT])
    splits, done = {}, 0
    for name, (seen, nodes) in places.items():
        inputs, samples = neighborhood(seen, nodes), {}
        for method in methods:
            logits = draw(model, inputs, method, num_samples, seed)[:, : len(nodes)]
            samples[method] = torch.softmax(logits, dim=-1)
            done += 1
            on_progress(done, len(places) * len(methods))
        labels = None if name == LEFT_OUT else graph.labels[nodes]
        edges = (
            edge_weights(model, graph, nodes, num_samples, seed)
            if name == "test" and config.attention.is_stochastic
            else None
        )
        splits[name] = SplitPredictions(samples, labels, edges=edges)
    return Predictions(splits, graph.class_names, methods, seed)


def add_feature_noise(graph: Graph, strength: float) -> Graph:
    """Add Gaussian noise to every feature, of `strength` standard deviations of the training nodes' features.

    The pattern is the same at every strength.
    """
    check_not_negative(strength=strength)
    noise = torch.randn(graph.features.shape, generator=torch.Generator().manual_seed(0))
    scale = strength * float(graph.features[graph.splits["train"]].std(correction=0))
    return replace(graph, features=graph.features + scale * noise if scale else graph.features)


@torch.no_grad()
def edge_weights(
    model: GraphAttentionNetwork, graph: Graph, nodes: Int[Tensor, " k"], num_samples: int, seed: int
) -> EdgeWeights:
    """Return sampled weights of the last layer, averaged over its heads, on the edges into some nodes."""
    inputs = whole_graph(graph)
    features = model.embed(inputs.x, inputs.edge_index)
    draws = []
    with sampling(model), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(num_samples):
            _, (_, weights) = model.output(features, inputs.output_edge_index, return_attention_weights=True)
            draws.append(weights.mean(dim=1))
    wanted = torch.isin(graph.edge_index[1], nodes)
    index = graph.edge_index[:, wanted]
    return EdgeWeights(nodes, index, torch.stack(draws)[:, wanted], graph.labels[index[0]])


def available_methods(config: GraphConfig) -> list[str]:
    """Return how predictions can be drawn from a network, the usual way second."""
    if config.attention.is_stochastic:
        return ["mean", "attention", *(["attention+dropout"] if config.dropout else [])]
    return ["mean", *(["dropout"] if config.dropout or config.attention.variant == "mc-dropout" else [])]


@torch.no_grad()
def draw(model: GraphAttentionNetwork, inputs: Inputs, method: str, num_samples: int, seed: int) -> Float[Tensor, "s n c"]:
    """Return class logits of a network in eval mode, draws first; one "draw" for method `mean`."""
    if method == "mean":
        return model(*inputs).unsqueeze(0)
    return predict(model, inputs, num_samples, seed, dropout=method.endswith("dropout")).logits


def measure_draws(
    validation: Float[Tensor, "s v c"],
    validation_labels: Int[Tensor, " v"],
    test: Float[Tensor, "s k c"],
    test_labels: Int[Tensor, " k"],
) -> dict[str, float]:
    """Return the standard metrics of test nodes from logits, and NLL and ECE after scaling by a validation temperature.

    PAvPU is from a paired t-test on the logits, as in the authors' graph code.
    """
    found = metrics.evaluate_predictions(test, test_labels, space="logit", num_resamples=0)
    values = {name: estimate.value for name, estimate in found.items()}
    temperature = metrics.fit_temperature(mean_logits(torch.softmax(validation.double(), dim=-1)), validation_labels)
    scaled = metrics.apply_temperature(mean_logits(torch.softmax(test.double(), dim=-1)), temperature)
    after = metrics.evaluate_predictions(scaled.unsqueeze(0), test_labels, num_resamples=0)
    return values | {"temperature": temperature, "scaled_nll": after["nll"].value, "scaled_ece": after["ece"].value}
