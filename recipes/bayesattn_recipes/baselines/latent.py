"""A latent alignment in a model: prior from the decoder, inference network over source and whole target, one loss."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bayesattn_recipes.baselines import categorical, dirichlet
from bayesattn_recipes.baselines.config import VARIATIONAL, AttentionChoice
from bayesattn_recipes.baselines.module import RivalModule
from bayesattn_recipes.baselines.variational import Bound, enum_bound, exact_nll, sample_bound


def run_packed(lstm: nn.LSTM, inputs: Float[Tensor, "b n d"], lengths: Sequence[int]) -> Float[Tensor, "b n h"]:
    """Run a bidirectional LSTM over sequences of different lengths; outputs beyond a length are 0.

    Args:
        lstm: An LSTM with `batch_first`.
        inputs: Padded sequences.
        lengths: Length of each; on the host, which then need not wait for the device.
    """
    (b, n, _), sizes = inputs.shape, np.asarray(lengths)
    if sizes.shape != (b,) or sizes.min(initial=1) < 1 or sizes.max(initial=1) > n:
        raise ValueError(f"lengths must be {b} integers from 1 to {n}, got {list(lengths)}")
    # step by step, with the sequences that are long enough, the longest first. Gathered and scattered by index: the
    # helpers of torch.nn.utils.rnn copy slice by slice, hundreds of small kernels in both passes
    longest_first = np.argsort(-sizes, kind="stable")
    is_there = np.arange(sizes.max(initial=0))[:, None] < sizes[longest_first]
    step, place = is_there.nonzero()
    rows = to_device(longest_first[place] * n + step, inputs.device)
    packed = PackedSequence(inputs.flatten(0, 1).index_select(0, rows), torch.from_numpy(is_there.sum(axis=1)))
    outputs = lstm(packed)[0].data
    return outputs.new_zeros(b * n, outputs.shape[1]).index_copy(0, rows, outputs).view(b, n, -1)


def to_device(indices: np.ndarray, device: torch.device) -> Int[Tensor, " rows"]:
    """Return indices that the host has computed as a tensor on the device; the host does not wait for the copy."""
    found = torch.from_numpy(indices)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


class InferenceNetwork(nn.Module):
    """Score every key for every output, given the output: h_target W h_source of two bidirectional LSTMs.

    Args:
        source_dim: Features of an embedded source token (or image region).
        target_dim: Features of an embedded target token.
        hidden_dim: Features of each direction.
        num_layers: Layers of each LSTM.
        dropout: Dropout rate between layers.
    """

    def __init__(
        self, source_dim: int, target_dim: int, hidden_dim: int, *, num_layers: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        options = {"num_layers": num_layers, "bidirectional": True, "batch_first": True, "dropout": dropout}
        self.source = nn.LSTM(source_dim, hidden_dim, **options)
        self.target = nn.LSTM(target_dim, hidden_dim, **options)
        self.bilinear = nn.Linear(2 * hidden_dim, 2 * hidden_dim, bias=False)

    def forward(
        self,
        source: Float[Tensor, "b n ds"],
        source_lengths: Sequence[int],
        target: Float[Tensor, "b t dt"],
        target_lengths: Sequence[int],
    ) -> Float[Tensor, "b t n"]:
        """Return the scores of q(z | x, y)."""
        keys = run_packed(self.source, source, source_lengths)
        queries = run_packed(self.target, target, target_lengths)
        return self.bilinear(queries) @ keys.transpose(1, 2)


class LatentAlignment(RivalModule):
    """The loss of a latent alignment; its decoder is an ordinary one, and the decoder's soft attention is the prior.

    Two functions compute the likelihood: `each_key()` returns ln p(y_t | z=j) for all keys, `mixed(weights)` that of the
    contexts Σ_j weights_j v_j, for m of them at each step. A model implements both with its own output layer, and only those
    needed are called.

    Training uses the posterior and records KL(q ‖ p), summed over steps; eval mode uses the prior alone: the exact
    marginal or, for the Dirichlet, its mean.

    Args:
        config: One of variant `variational-…`.
        inference: The network q(z | x, y); None for `variational-exact`, which has none.
    """

    def __init__(self, config: AttentionChoice, inference: nn.Module | None) -> None:
        super().__init__(config, *VARIATIONAL)
        if (inference is None) != (config.variant == "variational-exact"):
            wanted = "None" if config.variant == "variational-exact" else "a network"
            raise ValueError(f"inference must be {wanted} for {config.variant}, got {type(inference).__name__}")
        self.inference = inference

    def forward(
        self,
        prior_scores: Float[Tensor, "b t n"],
        *inputs: object,
        mask: Bool[Tensor, "b n"] | None = None,
        steps: Bool[Tensor, "b t"] | None = None,
        each_key: Callable[[], Float[Tensor, "b t n"]],
        mixed: Callable[[Float[Tensor, "b t m n"]], Float[Tensor, "b t m"]],
    ) -> Float[Tensor, "b t"]:
        """Return the negative log-likelihood of every step (in training its part of the bound); the KL is recorded.

        Args:
            prior_scores: The decoder's scores Φ.
            *inputs: Arguments of the inference network.
            mask: True for keys that exist.
            steps: True for steps with a label; the KL of others does not count.
            each_key: Likelihood of each key alone.
            mixed: Likelihood of mixed keys.
        """
        variant = self.config.variant
        valid = None if mask is None else mask.unsqueeze(1).expand(prior_scores.shape)
        log_prior = categorical.log_probs(prior_scores, valid)
        if not self.training or self.inference is None:
            if variant == "variational-dirichlet":
                nll = -_one(mixed, dirichlet.mean(dirichlet.concentration(prior_scores), valid))
            elif self.config.top_keys is not None:
                parts = categorical.largest(log_prior, self.config.top_keys)
                nll = exact_nll(parts.log_probs, mixed(parts.weights))
            else:
                nll = exact_nll(log_prior, each_key())
            return self.record(nll, None)
        scores = self.inference(*inputs)
        if variant == "variational-dirichlet":
            alpha_q, alpha_p = dirichlet.concentration(scores), dirichlet.concentration(prior_scores)
            bound = Bound(-_one(mixed, dirichlet.draw(alpha_q, valid)), dirichlet.kl(alpha_q, alpha_p, valid))
        else:
            log_posterior = categorical.log_probs(scores, valid)
            if variant == "variational-enum":
                bound = enum_bound(log_prior, log_posterior, each_key())
            else:
                bound = self._sampled(log_prior, log_posterior, mixed)
        kl = (bound.kl if steps is None else bound.kl * steps).sum(dim=1) if self.needs_kl else None
        return self.record(bound.nll, kl)

    def _sampled(self, log_prior: Tensor, log_posterior: Tensor, mixed: Callable[[Tensor], Tensor]) -> Bound:
        chosen = categorical.draw(log_posterior)
        likelihood = _one(mixed, categorical.one_hot(chosen, log_posterior))
        with torch.no_grad():
            soft = _one(mixed, torch.exp(log_prior))
        return sample_bound(log_prior, log_posterior, chosen, likelihood, soft)


def _one(mixed: Callable[[Tensor], Tensor], weights: Float[Tensor, "b t n"]) -> Float[Tensor, "b t"]:
    return mixed(weights.unsqueeze(2)).squeeze(2)
