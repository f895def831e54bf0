"""The two factories: a replacement of the softmax, and additive attention for decoders, for any config."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn import noise
from bayesattn.config import AttentionConfig
from bayesattn.functional.parts import kl_from_scores, masked_softmax, noisy_softmax
from bayesattn.kl import is_observing_entropy, note_entropy
from bayesattn.nn import AdditiveAttention, BayesianModule, BayesianWeights
from bayesattn.noise import keyed
from bayesattn.precision import upcast, without_autocast
from bayesattn_recipes.baselines.config import AttentionChoice
from bayesattn_recipes.baselines.dropout import DropoutWeights
from bayesattn_recipes.baselines.gaussian import GaussianContext, GaussianWeights
from bayesattn_recipes.baselines.hard import GumbelWeights, HardWeights
from bayesattn_recipes.baselines.module import RivalWeights
from bayesattn_recipes.baselines.rows import DenseRows
from bayesattn_recipes.baselines.sampled_kl import SampledKLWeights

# variant: its weights; the others are soft attention with something around it
WEIGHTS: dict[str, type[RivalWeights]] = {
    "hard-reinforce": HardWeights,
    "hard-gumbel": GumbelWeights,
    "gaussian-weights": GaussianWeights,
    "mc-dropout": DropoutWeights,
}


def build_weights(
    config: AttentionConfig, *, key_dim: int | None = None, num_heads: int = 1
) -> BayesianWeights | RivalWeights:
    """Build what takes the place of the softmax: a module from scores (and a mask) to weights.

    Args:
        config: A Bayesian variant, or a rival that changes the weights.
        key_dim: Features of a key; needed for contextual priors.
        num_heads: Heads of the scores; matters only for `prior_per_head`.
    """
    if not isinstance(config, AttentionChoice):
        return BayesianWeights(config, key_dim=key_dim, num_heads=num_heads)
    if config.variant in WEIGHTS:
        return WEIGHTS[config.variant](config)  # type: ignore[call-arg]  (subclasses name their variant themselves)
    if not config.is_bayesian:
        raise ValueError(f"variant is {config.variant!r}, which does not change the weights alone; allowed here: {_LISTED}")
    return (SampledKLWeights if config.sampled_kl else BayesianWeights)(config, key_dim=key_dim, num_heads=num_heads)


class StepAttention(AdditiveAttention):
    """Additive attention for a decoder, one call a step, with any weights and, if wanted, a noisy context.

    Soft attention's parameters have the same names here, so its checkpoints load.

    Args:
        query_dim: Features of a query.
        key_dim: Features of a key.
        hidden_dim: Width of the tanh layer.
        config: Which attention; any but the variational ones.
        value_dim: Features of a value; `key_dim` if None.
        bias: Whether the tanh layer has a bias.
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        hidden_dim: int,
        *,
        config: AttentionConfig,
        value_dim: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(query_dim, key_dim, hidden_dim, config=AttentionConfig("soft"), bias=bias)
        noisy = isinstance(config, AttentionChoice) and config.variant == "gaussian-context"
        self.context_noise = GaussianContext(config, value_dim or key_dim) if noisy else None  # type: ignore[arg-type]
        if not noisy:
            self.weights = build_weights(config, key_dim=key_dim)  # type: ignore[assignment]

    def forward(
        self,
        query: Float[Tensor, "b m dq"],
        key: Float[Tensor, "b n dk"],
        value: Float[Tensor, "b n dv"] | None = None,
        *,
        mask: Bool[Tensor, "b n"] | None = None,
        prepared: tuple[Tensor, Tensor | None] | None = None,
    ) -> tuple[Float[Tensor, "b m dv"], Float[Tensor, "b m n"]]:
        """Return the context of each query and the weights; arguments as for `AdditiveAttention`."""
        context, weights = super().forward(query, key, value, mask=mask, prepared=prepared)
        if self.context_noise is not None:
            context = self.context_noise(context, key if value is None else value, mask)
        return context, weights

    @property
    def draws_ahead(self) -> bool:
        """Whether the noise of all steps can be drawn before the first, and KLs and choices noted after the last.

        Then `plan_bias` and `plan_context` are all the randomness of a loop over steps, `planned_weights` and
        `GaussianContext.shift` all it asks of the attention, and `record_steps` all there is to do after it.
        """
        return isinstance(self.weights, BayesianWeights | HardWeights)

    @property
    def needs_kl(self) -> bool:
        """Whether the next call's KL reaches anyone."""
        return self._drawn.needs_kl

    @property
    def _drawn(self) -> BayesianModule:
        return self.weights if self.context_noise is None else self.context_noise

    def plan_bias(self, mask: Bool[Tensor, "b n"], num_steps: int) -> Float[Tensor, "b t n"]:
        """Return what is added to the scores Φ_t of step t: the noise of all steps' weights, drawn at once.

        Missing keys get −inf; where nothing is drawn one step stands for all (t = 1). A loop over decoding steps that adds
        this costs the same for soft and for Bayesian attention.
        """
        weights, (b, n) = self.weights, mask.shape
        closed = torch.zeros((b, 1, n), device=mask.device).masked_fill(~mask.unsqueeze(1), -math.inf)
        if not weights.is_sampling:
            return closed
        seed, shape = keyed.next_seeds(b, mask.device), (b, 1, num_steps, n)
        if isinstance(weights, HardWeights):
            # Gumbel noise: its largest sum with the scores is a draw of the key
            return closed - noise.exponential(seed, shape, device=mask.device).log().squeeze(1)
        return closed + noise.log_noise(seed, shape, weights.config, device=mask.device).squeeze(1)

    def plan_context(self, value: Float[Tensor, "b n d"], num_steps: int) -> Float[Tensor, "b t d"] | None:
        """Return the noise of all steps' contexts for `GaussianContext.shift`; None where contexts are not drawn."""
        if self.context_noise is None or not self.context_noise.is_sampling:
            return None
        b, _, d = value.shape
        return noise.normal(keyed.next_seeds(b, value.device), (b, 1, num_steps, d), device=value.device).squeeze(1)

    def planned_weights(self, scores: Float[Tensor, "b t n"], bias: Float[Tensor, "b #t n"]) -> Float[Tensor, "b t n"]:
        """Return the weights of steps from their scores and `plan_bias`, in float32 or better."""
        if isinstance(self.weights, HardWeights) and self.weights.is_sampling:
            total = upcast(scores) + bias
            return DenseRows.of(total, bias > -math.inf).largest(total)
        return noisy_softmax(upcast(scores), bias)

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
        """Return the KL of all steps at once: the same sum as one call a step, without padded steps; None if not needed.

        The closed form needs the scores alone, never the draws, so it can wait until the loop is over; a KL at the draws
        finds them in the bias.

        Args:
            scores: Φ of all steps.
            key: Read by the contextual prior; the values, where the context is drawn.
            mask: True for keys that exist.
            steps: True for steps that count.
            log_prior: ln Ψ of the keys, where `prepare` has computed it; None computes it from `key`.
            bias: Of `plan_bias`; only the closed form does without.
        """
        weights = self.weights
        if not self.needs_kl:
            return None
        if self.context_noise is not None:
            means = self.planned_weights(scores, self._given(bias)).to(key.dtype) @ key
            return (self.context_noise.kl(means, key, mask) * steps).sum(dim=1)
        with without_autocast(scores.device.type):
            full, rows = upcast(scores).unsqueeze(1), _rows(mask, steps)
            log_prior = weights.log_prior(key, mask.unsqueeze(1)) if log_prior is None else log_prior
            if isinstance(weights, SampledKLWeights) and weights.is_sampling:
                standard = weights.standard_noise(self._given(bias).unsqueeze(1).masked_fill(~mask[:, None, None], 0.0))
                kl = weights.kl_at(full, standard.expand(full.shape), log_prior, rows)
            else:
                kl = kl_from_scores(full, log_prior, rows, weights.config)
            # a mean over rows, or over the entries of rows of equal length, as a sum over steps
            return kl if weights.config.kl_reduction == "sum" else kl * steps.sum(dim=1)

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
        """Record the KL of all steps at once, note their choices, observe their entropy, and return `output`.

        Args:
            output: Any result of the steps; use the returned tensor in its place.
            scores: Φ of all steps.
            key: Read by the contextual prior.
            mask: True for keys that exist.
            steps: True for steps that count.
            log_prior: As for `steps_kl`.
            bias: As for `steps_kl`; hard attention needs it too.
            kl: Of `steps_kl`, where the loop has computed it already; None computes it.
        """
        if is_observing_entropy():
            rows = _rows(mask, steps)
            note_entropy(masked_softmax(upcast(scores.detach()).unsqueeze(1), rows), rows)
        if kl is None:
            kl = self.steps_kl(scores, key, mask=mask, steps=steps, log_prior=log_prior, bias=bias)
        if isinstance(self.weights, HardWeights) and self.weights.is_sampling:
            self.weights.note(upcast(scores), self.planned_weights(scores, self._given(bias)), mask.unsqueeze(1))
        return self._drawn.record(output, kl)

    def _given(self, bias: Float[Tensor, "b #t n"] | None) -> Float[Tensor, "b #t n"]:
        if bias is None:
            raise ValueError(f"bias is None; allowed for {self._drawn.config.variant}: what `plan_bias` returned")
        return bias


def _rows(mask: Bool[Tensor, "b n"], steps: Bool[Tensor, "b t"]) -> Bool[Tensor, "b 1 t n"]:
    return (mask.unsqueeze(1) & steps.unsqueeze(2)).unsqueeze(1)


def build_step_attention(
    config: AttentionConfig,
    query_dim: int,
    key_dim: int,
    hidden_dim: int,
    *,
    value_dim: int | None = None,
    bias: bool = True,
) -> StepAttention:
    """Build additive attention for a decoder: `module(query, key, …)` returns (context, weights).

    KL terms are recorded inside `record_kl()`; train hard attention inside `with_score_function`. Both do nothing for
    variants that do not need them, so one training loop serves all.

    Args:
        config: Which attention.
        query_dim: Features of a query.
        key_dim: Features of a key.
        hidden_dim: Width of the tanh layer.
        value_dim: Features of a value; `key_dim` if None.
        bias: Whether the tanh layer has a bias.

    Raises:
        ValueError: The variant is a latent alignment, which needs the likelihood of every key: see `LatentAlignment`.
    """
    return StepAttention(query_dim, key_dim, hidden_dim, config=config, value_dim=value_dim, bias=bias)


_LISTED = ", ".join(map(repr, (*AttentionConfig.allowed_variants, *WEIGHTS)))
