"""One frozen dataclass that says which Bayesian attention is meant, with named presets for its conventions."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from bayesattn.numbers import check_positive

Family = Literal["weibull", "lognormal"]
PriorKind = Literal["fixed", "contextual"]
Variant = Literal["soft", "BAM-NOKL", "BAM-LF", "BAM-LC", "BAM-WF", "BAM-WC"]
Preset = Literal["paper", "official-code", "default"]
ScoreForm = Literal["raw", "log_softmax"]
AlphaForm = Literal["psi", "beta_psi"]
MuForm = Literal["psi", "log_psi"]
KLReduction = Literal["sum", "row_mean", "mean"]

# variant: posterior family, prior kind (None: no KL). `soft` has no noise at all.
VARIANTS: dict[Variant, tuple[Family | None, PriorKind | None]] = {
    "soft": (None, None),
    "BAM-NOKL": ("weibull", None),
    "BAM-LF": ("lognormal", "fixed"),
    "BAM-LC": ("lognormal", "contextual"),
    "BAM-WF": ("weibull", "fixed"),
    "BAM-WC": ("weibull", "contextual"),
}

# the conventions on which the paper, its code and this library differ; docs/deviations.md gives the reasons
PRESETS: dict[Preset, dict[str, str]] = {
    "paper": {"score_form": "raw", "alpha_form": "psi", "mu_form": "psi", "kl_reduction": "sum"},
    "official-code": {"score_form": "log_softmax", "alpha_form": "beta_psi", "mu_form": "log_psi", "kl_reduction": "mean"},
    "default": {"score_form": "log_softmax", "alpha_form": "beta_psi", "mu_form": "log_psi", "kl_reduction": "row_mean"},
}

CHOICES: dict[str, tuple[str, ...]] = {
    "variant": get_args(Variant),
    "preset": get_args(Preset),
    "score_form": get_args(ScoreForm),
    "alpha_form": get_args(AlphaForm),
    "mu_form": get_args(MuForm),
    "kl_reduction": get_args(KLReduction),
}


@dataclass(frozen=True)
class AttentionConfig:
    """What is random about the attention weights, and what they are pulled towards.

    The default numbers and the `default` preset are those that trained well in the recipes, found on validation data
    (docs/deviations.md); the paper's own settings are in the configs of each recipe.

    Args:
        variant: `soft`, `BAM-NOKL`, or `BAM-` with L(ognormal) or W(eibull) posterior and F(ixed) or C(ontextual) prior.
        weibull_k: Weibull shape k; the log-noise has standard deviation 1.28/k.
        gamma_alpha: Shape of the fixed Gamma prior (BAM-WF).
        gamma_beta: Rate β of the Gamma prior.
        sigma_q: Standard deviation of the lognormal posterior's logarithm.
        sigma_p: The same of the lognormal prior.
        mu_p: Location of the fixed lognormal prior (BAM-LF).
        prior_hidden_dim: Width d_mid of the contextual prior's hidden layer.
        prior_per_head: One prior network per head instead of one shared by the heads of a module.
        detach_keys: Keep the prior's gradient out of the key projection.
        preset: Where the four options below come from when they are None.
        score_form: Φ of the KL: the `raw` scores, or their `log_softmax` over the valid keys.
        alpha_form: Contextual Gamma shape: α = Ψ (`psi`) or α = βΨ (`beta_psi`), whose prior mean is Ψ.
        mu_form: Contextual lognormal location: μ_p = Ψ (`psi`) or ln Ψ (`log_psi`).
        kl_reduction: Per example: `sum` over heads, queries and keys (the exact ELBO); `row_mean`, the sum over keys
            averaged over heads and queries; `mean` over all valid entries.
    """

    # a subclass that knows more variants lists them here (`baselines.AttentionChoice`)
    allowed_variants: ClassVar[tuple[str, ...]] = get_args(Variant)

    variant: Variant = "BAM-WC"
    _: dataclasses.KW_ONLY
    weibull_k: float = 5.0
    gamma_alpha: float = 0.1
    gamma_beta: float = 1.0
    sigma_q: float = 0.3
    sigma_p: float = 1.0
    mu_p: float = 0.0
    prior_hidden_dim: int = 10
    prior_per_head: bool = False
    detach_keys: bool = False
    preset: Preset = "default"
    score_form: ScoreForm | None = None
    alpha_form: AlphaForm | None = None
    mu_form: MuForm | None = None
    kl_reduction: KLReduction | None = None

    def __post_init__(self) -> None:
        choices = {**CHOICES, "variant": self.allowed_variants}
        _check_choice("preset", self.preset, choices["preset"])
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name, allowed in choices.items():
            _check_choice(name, getattr(self, name), allowed)
        for name in ("weibull_k", "gamma_alpha", "gamma_beta", "sigma_q", "sigma_p"):
            value = getattr(self, name)
            check_positive(**{name: value})
            object.__setattr__(self, name, float(value))
        if not isinstance(self.mu_p, int | float) or not math.isfinite(self.mu_p):
            raise ValueError(f"mu_p is {self.mu_p!r}; allowed: a finite number")
        if not isinstance(self.prior_hidden_dim, int) or self.prior_hidden_dim < 1:
            raise ValueError(f"prior_hidden_dim is {self.prior_hidden_dim!r}; allowed: an integer of at least 1")

    @property
    def family(self) -> Family | None:
        """Posterior family, or None for soft attention."""
        return VARIANTS[self.variant][0]

    @property
    def prior_kind(self) -> PriorKind | None:
        """Prior kind, or None where there is no KL."""
        return VARIANTS[self.variant][1]

    @property
    def is_stochastic(self) -> bool:
        """Whether the weights are sampled at all."""
        return self.family is not None

    @property
    def has_kl(self) -> bool:
        """Whether the variant has a KL term."""
        return self.prior_kind is not None

    @property
    def needs_key_dim(self) -> bool:
        """Whether a module needs to know the features of a key: its prior reads them."""
        return self.prior_kind == "contextual"

    @property
    def is_rival(self) -> bool:
        """Whether something else than this method takes the place of the softmax (`baselines.AttentionChoice`)."""
        return False

    def check_layers(self, *, on_edges: bool = False) -> None:
        """Raise where attention of many heads and layers, or on the edges of a graph, cannot be what the config says."""

    def build_rival(
        self, *, head_dim: int | None, num_heads: int, device: Any | None = None, dtype: Any | None = None
    ) -> Any:
        """Return the module that takes the place of softmax and average in an attention module, where `is_rival`."""
        raise ValueError(f"variant is {self.variant!r}, which is no rival; allowed: a baselines.AttentionChoice of one")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON or YAML."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "AttentionConfig":
        """Build a config from plain values; an unknown key is an error that lists the known ones."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"unknown AttentionConfig keys {unknown}; allowed: {known}")
        return cls(**values)


# a bare tuple: for `tuple[str, ...]` the tests' type checker draws an entry from Python's generator, in a hot place
def _check_choice(name: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")
