"""One config for every attention a recipe may name: soft, Bayesian, or a rival of Bayesian attention."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from bayesattn.config import DEFAULT_VARIANT, VARIANTS, AttentionConfig, Family, PriorKind, Variant
from bayesattn.scalars import check_choice, check_count, check_not_negative, check_positive, check_rate

# what each rival makes random: a choice of one key, the weights, the context vector, or a latent alignment of the output
Hard = Literal["hard-reinforce", "hard-gumbel"]
Gaussian = Literal["gaussian-context", "gaussian-weights"]
Variational = Literal["variational-exact", "variational-enum", "variational-sample", "variational-dirichlet"]
Choice = Literal[Variant, Hard, Gaussian, "mc-dropout", "uniform", Variational]
HARD, GAUSSIAN, VARIATIONAL = get_args(Hard), get_args(Gaussian), get_args(Variational)
RIVALS = (*HARD, *GAUSSIAN, "mc-dropout", "uniform", *VARIATIONAL)
# variants that exist for attention of many heads and layers
IN_LAYERS = (*VARIANTS, *HARD, *GAUSSIAN, "mc-dropout", "uniform")

Control = Literal["none", "moving-average", "self-critical"]
ContextPrior = Literal["keys", "zero"]


@dataclass(frozen=True, kw_only=True)
class AttentionChoice(AttentionConfig):
    """An `AttentionConfig` whose variant may also be one of the rivals; docs/recipes/rivals.md describes each.

    Use it as the type of a recipe's `attention` field: the YAML of every variant is then one flat mapping.

    Args:
        baseline: What `hard-reinforce` subtracts from the loss of a draw: nothing, the moving average of earlier losses, or
            the loss of a second pass with soft attention.
        entropy_bonus: Weight of the entropy of the choice (`hard-reinforce`), subtracted from the loss.
        temperature: Temperature of the Gumbel-softmax; towards 0 it becomes a choice of one key.
        straight_through: Whether `hard-gumbel` passes on only the chosen key, with the gradient of the relaxed weights.
        context_prior: What the Gaussian context is pulled towards: the mean of the `keys`, or `zero`.
        gaussian_sigma: Deviation of the weights at the start (`gaussian-weights`).
        attention_dropout: Dropout on the weights (`mc-dropout`).
        sampled_kl: Replace the closed-form KL of a Bayesian variant by ln q(S) − ln p(S) at the drawn S.
        inference_dim: Features of each direction of the inference network's LSTMs (`variational-…`).
        top_keys: Number of keys per row, the most probable ones, with their own likelihood (`variational-exact`); the rest
            share one more, that of their mean context. None: all keys.
    """

    allowed_variants: ClassVar[tuple[str, ...]] = get_args(Choice)

    variant: Choice = dataclasses.field(default=DEFAULT_VARIANT, kw_only=False)
    baseline: Control = "moving-average"
    entropy_bonus: float = 0.0
    temperature: float = 0.5
    straight_through: bool = False
    context_prior: ContextPrior = "keys"
    gaussian_sigma: float = 1.0
    attention_dropout: float = 0.1
    sampled_kl: bool = False
    inference_dim: int = 512
    top_keys: int | None = None

    def __post_init__(self, *given: Any) -> None:
        super().__post_init__(*given)
        for name, choices in (("baseline", get_args(Control)), ("context_prior", get_args(ContextPrior))):
            check_choice(name, getattr(self, name), choices)
        check_positive(temperature=self.temperature, gaussian_sigma=self.gaussian_sigma)
        check_not_negative(entropy_bonus=self.entropy_bonus)
        check_rate("attention_dropout", self.attention_dropout)
        check_count("inference_dim", self.inference_dim)
        if self.top_keys is not None:
            check_count("top_keys", self.top_keys)
            if self.variant != "variational-exact":
                raise ValueError(
                    f"top_keys must be None for {self.variant}; only variational-exact has it. Got {self.top_keys}"
                )
        if self.sampled_kl and not (self.is_bayesian and super().has_kl):
            raise ValueError(
                f"sampled_kl=True needs a variant with a KL (BAM-LF, BAM-LC, BAM-WF or BAM-WC), got {self.variant}"
            )

    @property
    def is_bayesian(self) -> bool:
        """Whether the variant is one of the library's own, soft attention included."""
        return self.variant in VARIANTS

    @property
    def is_rival(self) -> bool:
        """Whether something other than the library's own method replaces the softmax."""
        return not self.is_bayesian or self.sampled_kl

    def check_layers(self, *, on_edges: bool = False) -> None:
        """Refuse latent alignments, which do not exist for many heads and layers, and on edges the sampled KL."""
        if self.is_variational:
            raise ValueError(
                f"variant {self.variant!r} needs the likelihood of the output under every single key, which several heads "
                f"or layers do not have. Choose one of {', '.join(map(repr, IN_LAYERS))}"
            )
        if on_edges and self.sampled_kl:
            raise ValueError("sampled_kl must be False on edges: its estimate is written for dense scores")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values; for soft and Bayesian attention, those of an `AttentionConfig`."""
        values = super().to_dict()
        if self.is_rival:
            return values
        return {field.name: values[field.name] for field in dataclasses.fields(AttentionConfig)}

    @property
    def is_variational(self) -> bool:
        """Whether the variant is a latent alignment (Deng et al., 2018), which needs a `LatentAlignment`."""
        return self.variant in VARIATIONAL

    @property
    def family(self) -> Family | None:
        """Posterior family of a Bayesian variant; a rival has none, and code that reads it cannot run a rival."""
        self._only_bayesian()
        return super().family

    @property
    def prior_kind(self) -> PriorKind | None:
        """Prior kind of a Bayesian variant."""
        self._only_bayesian()
        return super().prior_kind

    @property
    def is_stochastic(self) -> bool:
        """Whether attention itself is drawn in training and inside `sampling(model)`; dropout does not count."""
        return super().is_stochastic if self.is_bayesian else self.variant in HARD + GAUSSIAN

    @property
    def has_kl(self) -> bool:
        """Whether the variant has a KL term."""
        if self.is_bayesian:
            return super().has_kl
        return self.variant in (*GAUSSIAN, "variational-enum", "variational-sample", "variational-dirichlet")

    def _only_bayesian(self) -> None:
        if not self.is_bayesian:
            raise ValueError(
                f"this module runs only {', '.join(map(repr, VARIANTS))}, got variant {self.variant!r}. Build it with "
                "bayesattn_recipes.baselines"
            )
