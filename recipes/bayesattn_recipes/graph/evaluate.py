"""Draw predictions from a trained graph attention network, and measure them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bayesattn import metrics
from bayesattn.evaluation.measure import mean_logits
from bayesattn.evaluation.runs import EdgeWeights, Predictions, SplitPredictions
from bayesattn.evaluation.threads import one_thread
from bayesattn.prediction import predict, sampling, seeded
from bayesattn.scalars import check_not_negative
from bayesattn_recipes.common.prediction import PredictRun, drawing_methods
from bayesattn_recipes.graph.config import GraphConfig
from bayesattn_recipes.graph.data import LEFT_OUT, Graph
from bayesattn_recipes.graph.inputs import Inputs, neighborhood, whole_graph
from bayesattn_recipes.graph.model import GraphAttentionNetwork
from bayesattn_recipes.graph.train import load_run


@dataclass(frozen=True)
class GraphPredictor:
    """A run of the recipe, and its graph."""

    config: GraphConfig
    model: GraphAttentionNetwork
    graph: Graph

    @property
    def variant(self) -> str:
        """What the run was trained with."""
        return self.config.attention.variant

    @property
    def methods(self) -> list[str]:
        """How it can be drawn."""
        return available_methods(self.config)

    def conditions(self, noise: tuple[float, ...], num_samples: int) -> dict[str, tuple[Graph, Int[Tensor, " k"]]]:
        """Return the validation and test nodes, the test nodes also with noise on all features, and the left-out ones."""
        graph, nodes = self.graph, self.graph.splits
        return {
            "validation": (graph, nodes["validation"]),
            "test": (graph, nodes["test"]),
            **{f"noise-{level:g}": (add_feature_noise(graph, level), nodes["test"]) for level in noise if level},
            **({LEFT_OUT: (graph, nodes[LEFT_OUT])} if LEFT_OUT in nodes else {}),
        }

    def predict(
        self, name: str, condition: tuple[Graph, Int[Tensor, " k"]], methods: Sequence[str], num_samples: int, seed: int
    ) -> SplitPredictions:
        """Predict some nodes; keep the drawn attention for the test nodes."""
        graph, nodes = condition
        inputs, samples = neighborhood(graph, nodes), {}
        for method in methods:
            logits = draw(self.model, inputs, method, num_samples, seed)[:, : len(nodes)]
            samples[method] = torch.softmax(logits, dim=-1)
        labels, edges = None if name == LEFT_OUT else graph.labels[nodes], None
        if name == "test" and self.config.attention.is_stochastic:
            edges = edge_weights(self.model, graph, nodes, num_samples, seed)
        return SplitPredictions(samples, labels, edges=edges)

    def assemble(self, splits: dict[str, SplitPredictions], methods: list[str], seed: int) -> Predictions:
        """Add the names of the classes."""
        return Predictions(splits, self.graph.class_names, methods, seed)


predict_run = one_thread()(PredictRun(lambda folder, data: GraphPredictor(*load_run(folder, data))))


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
    with sampling(model), seeded(seed, [features.device]):
        for _ in range(num_samples):
            _, (_, weights) = model.output(features, inputs.output_edge_index, return_attention_weights=True)
            draws.append(weights.mean(dim=1))
    wanted = torch.isin(graph.edge_index[1], nodes)
    index = graph.edge_index[:, wanted]
    return EdgeWeights(nodes, index, torch.stack(draws)[:, wanted], graph.labels[index[0]])


def available_methods(config: GraphConfig) -> list[str]:
    """Return how predictions can be drawn from a network, the usual way second."""
    drops = config.dropout > 0.0 or config.attention.variant == "mc-dropout"
    return drawing_methods(is_stochastic=config.attention.is_stochastic, drops=drops)


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
