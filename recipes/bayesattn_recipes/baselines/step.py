"""The rivals in a decoder: those that can be drawn for all steps at once, and attention for decoders from any config."""

import math
from functools import partial

from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn import noise
from bayesattn.config import AttentionConfig
from bayesattn.functional.parts import kl_from_scores, noisy_softmax
from bayesattn.nn import StepAttention
from bayesattn.nn.step import closed_keys, counted_entries, summed_over_steps
from bayesattn.noise import keyed
from bayesattn.precision import upcast, without_autocast
from bayesattn_recipes.baselines.attention import RivalAttention
from bayesattn_recipes.baselines.config import AttentionChoice
from bayesattn_recipes.baselines.hard import HardWeights
from bayesattn_recipes.baselines.rows import DenseRows
from bayesattn_recipes.baselines.sampled_kl import SampledKLWeights
from bayesattn_recipes.baselines.uniform import UniformWeights


class RivalSteps(RivalAttention):
    """`RivalAttention` that can be drawn ahead (`bayesattn.nn.StepWeights`).

    A chosen key, a noisy context, a sampled KL; and uniform weights, which have no noise.
    """

    @property
    def needs_kl(self) -> bool:
        """Whether the KL of the next steps is recorded."""
        return self.drawn.needs_kl

    def plan_bias(self, mask: Bool[Tensor, "b n"], num_steps: int) -> Float[Tensor, "b #t n"]:
        """Return the noise of all steps' weights: Gumbel noise for a choice of one key, else that of Bayesian attention."""
        weights, shape = self.weights, (len(mask), 1, num_steps, mask.shape[1])
        if weights is None or not weights.is_sampling:
            return closed_keys(mask)
        seed = keyed.next_seeds(len(mask), mask.device)
        if isinstance(weights, HardWeights):
            # the largest sum of Gumbel noise and scores is a draw of the key
            return closed_keys(mask) - noise.exponential(seed, shape, device=mask.device).log().squeeze(1)
        return closed_keys(mask) + noise.log_noise(seed, shape, weights.config, device=mask.device).squeeze(1)

    def plan_context(self, value: Float[Tensor, "b n d"], num_steps: int) -> Float[Tensor, "b t d"] | None:
        """Return the noise of all steps' contexts; None if contexts are not drawn."""
        if self.context_noise is None or not self.context_noise.is_sampling:
            return None
        b, _, d = value.shape
        return noise.normal(keyed.next_seeds(b, value.device), (b, 1, num_steps, d), device=value.device).squeeze(1)

    def planned_weights(self, scores: Float[Tensor, "b t n"], bias: Float[Tensor, "b #t n"]) -> Float[Tensor, "b t n"]:
        """Return the weights of steps from their scores and `plan_bias`, in float32 or better."""
        if isinstance(self.weights, HardWeights) and self.weights.is_sampling:
            total = upcast(scores) + bias
            return DenseRows.of(total, bias > -math.inf).largest(total)
        if isinstance(self.weights, UniformWeights):
            return noisy_softmax(self.weights.flat(upcast(scores)), bias)
        return noisy_softmax(upcast(scores), bias)

    def planned_context(self, context: Float[Tensor, "b t d"], noise: Float[Tensor, "b #t d"]) -> Float[Tensor, "b t d"]:
        """Return the draw of the context for the noise of `plan_context`."""
        assert self.context_noise is not None
        return self.context_noise.shift(context, noise)

    def steps_kl(
        self,
        scores: Float[Tensor, "b t n"],
        key: Float[Tensor, "b n dk"],
        *,
        mask: Bool[Tensor, "b n"],
        steps: Bool[Tensor, "b t"],
        bias: Float[Tensor, "b #t n"] | None,
    ) -> Float[Tensor, " b"] | None:
        """Return the KL of all steps: of the drawn contexts, or at the drawn weights, which the bias gives."""
        if self.context_noise is not None:
            means = self.planned_weights(scores, self._given(bias)).to(key.dtype) @ key
            return (self.context_noise.kl(means, key, mask) * steps).sum(dim=1)
        weights = self.weights
        if not isinstance(weights, SampledKLWeights):
            return None
        with without_autocast(scores.device.type):
            full, entries = upcast(scores).unsqueeze(1), counted_entries(mask, steps)
            log_prior = weights.log_prior(key, mask.unsqueeze(1))
            if weights.is_sampling:
                log_noise = self._given(bias).unsqueeze(1).masked_fill(~mask[:, None, None], 0.0)
                kl = weights.kl_at(full, weights.standard_noise(log_noise).expand(full.shape), log_prior, entries)
            else:
                kl = kl_from_scores(full, log_prior, entries, weights.config)
            return summed_over_steps(kl, steps, weights.config)

    def note_steps(
        self, scores: Float[Tensor, "b t n"], mask: Bool[Tensor, "b n"], bias: Float[Tensor, "b #t n"] | None
    ) -> None:
        """Note the choices of all steps, for the gradient of REINFORCE."""
        if isinstance(self.weights, HardWeights) and self.weights.is_sampling:
            self.weights.note(upcast(scores), self.planned_weights(scores, self._given(bias)), mask.unsqueeze(1))

    def _given(self, bias: Float[Tensor, "b #t n"] | None) -> Float[Tensor, "b #t n"]:
        if bias is None:
            raise ValueError(f"bias must be the result of `plan_bias` for {self.name}, got None")
        return bias


def build_step_attention(
    config: AttentionConfig, query_dim: int, key_dim: int, hidden_dim: int, *, bias: bool = True
) -> StepAttention:
    """Build additive attention for a decoder: `module(query, key, …)` returns (context, weights).

    KL terms are recorded inside `record_kl()`; train hard attention inside `with_score_function`. Both do nothing for
    variants that do not need them, so one training loop serves all.

    Args:
        config: Soft, Bayesian or a rival.
        query_dim: Features of a query.
        key_dim: Features of a key.
        hidden_dim: Width of the tanh layer.
        bias: Whether the tanh layer has a bias.

    Raises:
        ValueError: The variant is a latent alignment, which needs the likelihood of every key: see `LatentAlignment`.
    """
    sizes = (query_dim, key_dim, hidden_dim)
    if not isinstance(config, AttentionChoice) or not config.is_rival:
        return StepAttention(*sizes, config=config, bias=bias)
    is_planned = config.sampled_kl or config.variant in ("hard-reinforce", "gaussian-context", "uniform")
    return StepAttention(*sizes, weights=partial(RivalSteps if is_planned else RivalAttention, config), bias=bias)
