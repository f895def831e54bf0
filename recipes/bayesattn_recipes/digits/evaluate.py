"""Ask a trained digit classifier for M predictions on every test split, and for the attention behind them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bayesattn.evaluation.runs import Predictions, SplitPredictions
from bayesattn.evaluation.threads import one_thread
from bayesattn.kl import record_kl
from bayesattn.prediction import predict, sampling
from bayesattn_recipes.common.runs import choose_methods
from bayesattn_recipes.digits.data import CLASS_NAMES, Split, evaluation_splits
from bayesattn_recipes.digits.model import PATCH, DigitClassifier
from bayesattn_recipes.digits.train import DigitsConfig, load_run

# draws per forward pass: larger is slower, because the activations leave the cache
CHUNK_SIZE = 2


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
    """Predict every evaluation split of a run with every method.

    Args:
        folder: The run.
        num_samples: M, at least 2.
        noise: Strengths of the noisy test sets.
        methods: What is drawn: nothing (`mean`), the `attention` weights of a Bayesian model, alone or with its dropout
            masks (`attention+dropout`), or the `dropout` masks of a soft one. None takes `mean` and the first of these.
        seed: Of the draws.
        data: The folder of the data sets, in which there is nothing to look for: the images come with scikit-learn.
        on_progress: Called with the number of splits and methods done and to do, for a progress bar.
    """
    config, model = load_run(folder)
    methods = choose_methods(methods, available_methods(config), num_samples, config.attention.variant)
    splits = evaluation_splits(config.train_size, noise)
    predictions, done = {}, 0
    for name, split in splits.items():
        samples = {}
        for method in methods:
            samples[method] = draw(model, split.images, method, num_samples, seed)
            done += 1
            on_progress(done, len(splits) * len(methods))
        attention, images = {}, None
        if name == "test":
            attention, images = attention_maps(model, split, num_samples, seed), split.images
        predictions[name] = SplitPredictions(samples, split.labels, images, attention)
    return Predictions(predictions, CLASS_NAMES, methods, seed, key_grid=(8 // PATCH, 8 // PATCH))


def available_methods(config: DigitsConfig) -> list[str]:
    """Return how predictions can be drawn from a model, the usual way second."""
    if config.attention.is_stochastic:
        return ["mean", "attention", *(["attention+dropout"] if config.dropout else [])]
    return ["mean", *(["dropout"] if config.dropout or config.attention.variant == "mc-dropout" else [])]


@torch.no_grad()
def draw(
    model: DigitClassifier, images: Float[Tensor, "n 8 8"], method: str, num_samples: int, seed: int
) -> Float[Tensor, "s n c"]:
    """Return class probabilities, draws first; one "draw" for method `mean`."""
    if method == "mean":
        return torch.softmax(model(images), dim=-1).unsqueeze(0)
    has_dropout = method.endswith("dropout")
    return predict(model, images, num_samples, seed, CHUNK_SIZE, batch_dims=0, dropout=has_dropout).samples


@torch.no_grad()
def attention_maps(
    model: DigitClassifier, split: Split, num_samples: int, seed: int
) -> dict[str, Float[Tensor, "n heads keys"]]:
    """Return what the readout token of the last layer looks at: mean weights and, where drawn, deviation and prior Ψ."""
    attend = model.last_attention
    seen: list[Tensor] = []

    def ask(module, args, kwargs):
        return args, {**kwargs, "need_weights": True, "average_attn_weights": False}

    hooks = [
        attend.register_forward_pre_hook(ask, with_kwargs=True),
        attend.register_forward_hook(lambda module, args, result: seen.append(result[1][:, :, 0])),
    ]
    try:
        model(split.images)
        maps = {"mean": seen.pop()}
        if attend.config.is_stochastic:
            with sampling(model), torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                for _ in range(max(num_samples, 2)):
                    model(split.images)
            maps["std"] = torch.stack(seen).std(dim=0)
    finally:
        for hook in hooks:
            hook.remove()
    if attend.bayes_prior is not None:
        hook = attend.bayes_prior.register_forward_hook(lambda module, args, log_prior: seen.append(log_prior.exp()))
        try:
            # the prior is computed only where a KL is wanted
            with record_kl():
                model(split.images)
        finally:
            hook.remove()
        maps["prior"] = seen[-1].squeeze(-2).expand_as(maps["mean"])
    return maps
