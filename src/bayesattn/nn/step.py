"""Additive attention for decoders: one query per step, with the noise of all steps drawn before the first.

A decoder that is trained on given outputs knows how many steps it will make. Its loop then needs neither draws nor a KL:

    bias, noise = attention.plan_bias(mask, num_steps), attention.plan_context(values, num_steps)
    for each step t:                                   # the same cost for soft and for Bayesian attention
        scores = attention.scores(query, keys)
        context, weights = attention.planned(scores, values, bias[:, t], noise[:, t])
    states = attention.record_steps(states, all_scores, values, mask=mask, steps=steps, bias=bias)

The closed-form KL needs only the scores, never the draws, so it can wait until the loop is over.
"""

import math
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn import noise, sensitivity
from bayesattn.config import AttentionConfig
from bayesattn.entropy import is_observing_entropy, note_entropy
from bayesattn.functional.parts import kl_from_scores, masked_softmax, noisy_softmax
from bayesattn.nn.additive import AdditiveAttention
from bayesattn.noise import keyed
from bayesattn.precision import upcast, without_autocast


@runtime_checkable
class StepWeights(Protocol):
    """What `weights=` needs besides `AttentionWeights` to be drawn ahead; without it the object draws at every step.

    Example:
        >>> import bayesattn as ba
        >>> isinstance(ba.nn.BayesianWeights(ba.AttentionConfig("BAM-NOKL")), StepWeights)  # it draws whenever it is called
        False
    """

    @property
    def needs_kl(self) -> bool:
        """Whether the next call's KL is recorded."""
        ...

    def plan_bias(self, mask: Bool[Tensor, "b n"], num_steps: int) -> Float[Tensor, "b #t n"]:
        """Return the noise of all steps' weights, −inf at missing keys."""
        ...

    def plan_context(self, value: Float[Tensor, "b n d"], num_steps: int) -> Float[Tensor, "b t d"] | None:
        """Return the noise of all steps' contexts; None where contexts are not drawn."""
        ...

    def planned_weights(self, scores: Float[Tensor, "b t n"], bias: Float[Tensor, "b #t n"]) -> Float[Tensor, "b t n"]:
        """Return the weights of steps from their scores and noise."""
        ...

    def planned_context(self, context: Float[Tensor, "b t d"], noise: Float[Tensor, "b #t d"]) -> Float[Tensor, "b t d"]:
        """Return the drawn context of steps from its mean and noise."""
        ...

    def steps_kl(
        self,
        scores: Float[Tensor, "b t n"],
        key: Float[Tensor, "b n dk"],
        *,
        mask: Bool[Tensor, "b n"],
        steps: Bool[Tensor, "b t"],
        bias: Float[Tensor, "b #t n"] | None,
    ) -> Float[Tensor, " b"] | None:
        """Return the KL of all steps; None where there is none."""
        ...

    def note_steps(
        self, scores: Float[Tensor, "b t n"], mask: Bool[Tensor, "b n"], bias: Float[Tensor, "b #t n"] | None
    ) -> None:
        """Note the draws of all steps, for gradients that need them."""
        ...


class StepAttention(AdditiveAttention):
    """`AdditiveAttention` whose noise can be drawn for all steps of a decoder at once.

    Arguments and parameters are those of `AdditiveAttention`, so the checkpoints of one load into the other.

    Example:
        >>> import bayesattn as ba
        >>> attention = StepAttention(6, 8, 10, config=ba.AttentionConfig("BAM-NOKL"))
        >>> values, mask = torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.bool)
        >>> (keys, _), bias = attention.prepare(values, mask), attention.plan_bias(mask, num_steps=3)
        >>> context, weights = attention.planned(attention.scores(torch.randn(2, 1, 6), keys), values, bias[:, :1])
        >>> bias.shape, context.shape
        (torch.Size([2, 3, 5]), torch.Size([2, 1, 8]))
    """

    @property
    def draws_ahead(self) -> bool:
        """Whether the noise of all steps can be drawn before the first; only some `weights=` cannot."""
        return self.bayes_weights is None or hasattr(self.bayes_weights, "plan_bias")

    @property
    def needs_kl(self) -> bool:
        """Whether the KL of steps that are drawn ahead is recorded."""
        return self.weights.needs_kl if self.bayes_weights is None else self.draws_ahead and self.bayes_weights.needs_kl

    def plan_bias(self, mask: Bool[Tensor, "b n"], num_steps: int) -> Float[Tensor, "b #t n"]:
        """Return what is added to the scores Φ_t of every step t: the noise of all steps' weights, drawn at once.

        Missing keys get −inf. Without noise one step stands for all (t = 1).
        """
        if self.bayes_weights is not None:
            return self.bayes_weights.plan_bias(mask, num_steps)
        closed = closed_keys(mask)
        if not self.weights.is_sampling:
            return closed
        seed, shape = keyed.next_seeds(len(mask), mask.device), (len(mask), 1, num_steps, mask.shape[1])
        return closed + noise.log_noise(seed, shape, self.weights.config, device=mask.device).squeeze(1)

    def plan_context(self, value: Float[Tensor, "b n d"], num_steps: int) -> Float[Tensor, "b t d"] | None:
        """Return the noise of all steps' contexts; None where only the weights are drawn."""
        return None if self.bayes_weights is None else self.bayes_weights.plan_context(value, num_steps)

    def planned_weights(self, scores: Float[Tensor, "b t n"], bias: Float[Tensor, "b #t n"]) -> Float[Tensor, "b t n"]:
        """Return the weights of steps from their scores and `plan_bias`, in float32 or better."""
        if self.bayes_weights is not None:
            return self.bayes_weights.planned_weights(scores, bias)
        scores = upcast(scores)
        if self.weights.is_measured:
            scores = sensitivity.through_scores(scores, self.weights)
        return noisy_softmax(scores, bias)

    def planned(
        self,
        scores: Float[Tensor, "b t n"],
        value: Float[Tensor, "b n d"],
        bias: Float[Tensor, "b #t n"],
        noise: Float[Tensor, "b #t d"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b t n"]]:
        """Return context and weights of steps, drawn with the noise of `plan_bias` and `plan_context`."""
        weights = self.planned_weights(scores, bias)
        context = weights.to(value.dtype) @ value
        return (context if noise is None else self.bayes_weights.planned_context(context, noise)), weights

    def steps_kl(
        self,
        scores: Float[Tensor, "b t n"],
        key: Float[Tensor, "b n dk"],
        *,
        mask: Bool[Tensor, "b n"],
        steps: Bool[Tensor, "b t"],
        log_prior: Float[Tensor, "b 1 1 n"] | None = None,
        bias: Float[Tensor, "b #t n"] | None = None,
    ) -> Float[Tensor, " b"] | None:
        """Return the KL of all steps at once, the same sum as one call per step; None if it is not recorded.

        Args:
            scores: Φ of all steps.
            key: Read by the contextual prior; the values, where the context is drawn.
            mask: True for keys that exist.
            steps: True for steps that count.
            log_prior: ln Ψ of the keys, where `prepare` has computed it; None computes it from `key`.
            bias: From `plan_bias`; the closed form does not need it, some `weights=` do.
        """
        if not self.needs_kl:
            return None
        if self.bayes_weights is not None:
            return self.bayes_weights.steps_kl(scores, key, mask=mask, steps=steps, bias=bias)
        weights = self.weights
        with without_autocast(scores.device.type):
            log_prior = weights.log_prior(key, mask.unsqueeze(1)) if log_prior is None else log_prior
            kl = kl_from_scores(upcast(scores).unsqueeze(1), log_prior, counted_entries(mask, steps), weights.config)
            return summed_over_steps(kl, steps, weights.config)

    def record_steps(
        self,
        output: Float[Tensor, "..."],
        scores: Float[Tensor, "b t n"],
        key: Float[Tensor, "b n dk"],
        *,
        mask: Bool[Tensor, "b n"],
        steps: Bool[Tensor, "b t"],
        log_prior: Float[Tensor, "b 1 1 n"] | None = None,
        bias: Float[Tensor, "b #t n"] | None = None,
        kl: Float[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "..."]:
        """Record the KL of all steps at once, observe their entropy, and return `output`.

        Args:
            output: Any result of the steps; use the returned tensor in its place.
            scores: Φ of all steps.
            key: As for `steps_kl`, like the next four.
            mask: True for keys that exist.
            steps: True for steps that count.
            log_prior: ln Ψ of the keys.
            bias: From `plan_bias`.
            kl: From `steps_kl`, where it has been called already; None calls it.
        """
        if is_observing_entropy():
            entries = counted_entries(mask, steps)
            note_entropy(masked_softmax(upcast(scores.detach()).unsqueeze(1), entries), entries)
        if kl is None:
            kl = self.steps_kl(scores, key, mask=mask, steps=steps, log_prior=log_prior, bias=bias)
        if self.bayes_weights is not None:
            self.bayes_weights.note_steps(scores, mask, bias)
        return self.weights.record(output, kl)


def closed_keys(mask: Bool[Tensor, "b n"]) -> Float[Tensor, "b 1 n"]:
    """Return what to add to scores to mask missing keys: −inf there, 0 elsewhere."""
    return torch.zeros((len(mask), 1, mask.shape[1]), device=mask.device).masked_fill(~mask.unsqueeze(1), -math.inf)


def summed_over_steps(kl: Float[Tensor, " b"], steps: Bool[Tensor, "b t"], config: AttentionConfig) -> Float[Tensor, " b"]:
    """Return the KL as a sum over steps where `kl_from_scores` took a mean over rows, or over entries of equal rows."""
    return kl if config.kl_reduction == "sum" else kl * steps.sum(dim=1)


def counted_entries(mask: Bool[Tensor, "b n"], steps: Bool[Tensor, "b t"]) -> Bool[Tensor, "b 1 t n"]:
    """Return which entries of the scores of all steps count: existing keys of steps that count."""
    return (mask.unsqueeze(1) & steps.unsqueeze(2)).unsqueeze(1)
