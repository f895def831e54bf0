"""One frozen dataclass that describes the Bayesian attention, with named presets for its conventions."""

import dataclasses
import math
from dataclasses import InitVar, dataclass
from enum import Enum
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from bayesattn.scalars import check_choice, check_count, check_positive

Family = Literal["weibull", "lognormal"]
Posterior = Literal["none", "weibull", "lognormal"]
PriorKind = Literal["fixed", "contextual"]
Variant = Literal["soft", "BAM-NOKL", "BAM-LF", "BAM-LC", "BAM-WF", "BAM-WC"]
Preset = Literal["paper", "official-code", "default"]
ScoreForm = Literal["raw", "log_softmax"]
AlphaForm = Literal["psi", "beta_psi"]
MuForm = Literal["psi", "log_psi"]
KLReduction = Literal["sum", "row_mean", "mean"]


class Unspecified(Enum):
    """An argument that was not given, where None means something."""

    TOKEN = "unspecified"


# the value of `variant` when none is given; a subclass with more variants repeats it
DEFAULT_VARIANT: Any = Unspecified.TOKEN

# the field that sets the noise of a family
NOISE_FIELD: dict[str, str] = {"weibull": "weibull_k", "lognormal": "sigma_q"}
# variant: posterior family, prior kind (None: no KL). `soft` has no noise at all.
VARIANTS: dict[Variant, tuple[Family | None, PriorKind | None]] = {
    "soft": (None, None),
    "BAM-NOKL": ("weibull", None),
    "BAM-LF": ("lognormal", "fixed"),
    "BAM-LC": ("lognormal", "contextual"),
    "BAM-WF": ("weibull", "fixed"),
    "BAM-WC": ("weibull", "contextual"),
}

# the inverse
_CODES = {pair: variant for variant, pair in VARIANTS.items()}
# the variant of a config that names neither a variant nor posterior and prior
_DEFAULT: Variant = "BAM-WC"

# the conventions on which the paper, its code and this library differ; docs/concepts/deviations.md gives the reasons
PRESETS: dict[Preset, dict[str, str]] = {
    "paper": {"score_form": "raw", "alpha_form": "psi", "mu_form": "psi", "kl_reduction": "sum"},
    "official-code": {"score_form": "log_softmax", "alpha_form": "beta_psi", "mu_form": "log_psi", "kl_reduction": "mean"},
    "default": {"score_form": "log_softmax", "alpha_form": "beta_psi", "mu_form": "log_psi", "kl_reduction": "row_mean"},
}

# `dataclasses.replace` passes every old value on as if it had been given. So a value that a preset fills in is a separate
# string object: equal to the plain string, but distinguishable by identity from the same value given by a user
_FILLED = {preset: {name: str(form.encode(), "ascii") for name, form in forms.items()} for preset, forms in PRESETS.items()}

CHOICES: dict[str, tuple[str, ...]] = {
    "variant": get_args(Variant),
    "preset": get_args(Preset),
    "score_form": get_args(ScoreForm),
    "alpha_form": get_args(AlphaForm),
    "mu_form": get_args(MuForm),
    "kl_reduction": get_args(KLReduction),
}


class _Origin(NamedTuple):
    """What `dataclasses.replace` cannot tell from its arguments: the old variant, and the forms its preset filled in."""

    variant: str
    filled: dict[str, str]


@dataclass(frozen=True)
class AttentionConfig:
    """The distribution of the attention weights, and the prior they are pulled towards.

        AttentionConfig(posterior="weibull", prior="contextual")  ==  AttentionConfig("BAM-WC")

    The default numbers and the `default` preset trained well in the recipes; they were chosen on validation data
    (docs/concepts/deviations.md). The paper's own settings are in the configs of each recipe.

    `dataclasses.replace(config, preset=...)` changes the forms that came from the old preset and keeps those given
    explicitly. `replace` also takes `variant`, or `posterior` and `prior`.

    Args:
        variant: The paper's code: `soft`, `BAM-NOKL`, or `BAM-` with L(ognormal) or W(eibull) posterior and F(ixed) or
            C(ontextual) prior. Alternatively, give the next two. Without any of the three it is `BAM-WC`.
        posterior: Distribution of the unnormalized weights: `weibull`, `lognormal`, or `none` (or None) for soft attention.
            Read it as `config.family`.
        prior: What the KL pulls towards: a `contextual` prior, computed from the keys, a `fixed` one, or None for no KL.
            Read it as `config.prior_kind`.
        weibull_k: Weibull shape k; the log-noise has standard deviation 1.28/k.
        gamma_alpha: Shape of the fixed Gamma prior (BAM-WF).
        gamma_beta: Rate β of the Gamma prior.
        sigma_q: Standard deviation of the lognormal posterior's logarithm.
        sigma_p: The same for the lognormal prior.
        mu_p: Location of the fixed lognormal prior (BAM-LF).
        prior_hidden_dim: Width d_mid of the contextual prior's hidden layer.
        prior_per_head: One prior network per head instead of one shared by the heads of a module.
        detach_keys: Keep the prior's gradient out of the key projection.
        preset: Sets those of the four options below that are None.
        score_form: Φ of the KL: the `raw` scores, or their `log_softmax` over the valid keys.
        alpha_form: Contextual Gamma shape: α = Ψ (`psi`) or α = βΨ (`beta_psi`), whose prior mean is Ψ.
        mu_form: Contextual lognormal location: μ_p = Ψ (`psi`) or ln Ψ (`log_psi`).
        kl_reduction: Per example: `sum` over heads, queries and keys (the exact ELBO); `row_mean`, the sum over keys
            averaged over heads and queries; `mean` over all valid entries.

    Example:
        >>> AttentionConfig(posterior="weibull", prior="contextual", weibull_k=3) == AttentionConfig("BAM-WC", weibull_k=3)
        True
        >>> AttentionConfig("BAM-LF").family, AttentionConfig("BAM-LF").prior_kind
        ('lognormal', 'fixed')
    """

    # a subclass with more variants lists them here
    allowed_variants: ClassVar[tuple[str, ...]] = get_args(Variant)

    variant: Variant = DEFAULT_VARIANT
    _: dataclasses.KW_ONLY
    posterior: InitVar[Posterior | Unspecified | None] = Unspecified.TOKEN
    prior: InitVar[PriorKind | Unspecified | None] = Unspecified.TOKEN
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
    # passed by `dataclasses.replace` only, from the attribute of this name
    _origin: InitVar[_Origin | None] = None

    def __post_init__(
        self,
        posterior: Posterior | Unspecified | None,
        prior: PriorKind | Unspecified | None,
        _origin: _Origin | None,
    ) -> None:
        object.__setattr__(self, "variant", self._code(posterior, prior, _origin))
        choices = {**CHOICES, "variant": self.allowed_variants}
        check_choice("preset", self.preset, choices["preset"])
        filled = {}
        for name, value in _FILLED[self.preset].items():
            given = getattr(self, name)
            if given is None or (_origin is not None and given is _origin.filled.get(name)):
                filled[name] = value
                object.__setattr__(self, name, value)
        for name, allowed in choices.items():
            check_choice(name, getattr(self, name), allowed)
        for name in PRESETS[self.preset].keys() - filled.keys():
            # the plain string, whatever config it was read from
            object.__setattr__(self, name, next(choice for choice in choices[name] if choice == getattr(self, name)))
        object.__setattr__(self, "_origin", _Origin(self.variant, filled))
        for name in ("weibull_k", "gamma_alpha", "gamma_beta", "sigma_q", "sigma_p"):
            value = getattr(self, name)
            check_positive(**{name: value})
            object.__setattr__(self, name, float(value))
        if not isinstance(self.mu_p, int | float) or not math.isfinite(self.mu_p):
            raise ValueError(f"mu_p must be a finite number, got {self.mu_p!r}")
        check_count("prior_hidden_dim", self.prior_hidden_dim)

    def _code(
        self, posterior: Posterior | Unspecified | None, prior: PriorKind | Unspecified | None, origin: _Origin | None
    ) -> str:
        """Return the variant's code, given directly or as posterior and prior."""
        is_code_given = self.variant is not DEFAULT_VARIANT if origin is None else self.variant != origin.variant
        variant = _DEFAULT if self.variant is DEFAULT_VARIANT else self.variant
        given = {"posterior": posterior, "prior": prior}
        given = {name: value for name, value in given.items() if not isinstance(value, Unspecified)}
        check_choice("variant", variant, self.allowed_variants)
        if not given:
            return variant
        for name, kinds in (("posterior", get_args(Posterior)), ("prior", get_args(PriorKind))):
            check_choice(name, given.get(name), (*kinds, None))
        named = ", ".join(f"{name}={value!r}" for name, value in given.items())
        if variant not in VARIANTS:
            raise ValueError(
                f"posterior and prior cannot be combined with variant {variant!r}, got {named}. Give one or the other"
            )
        old_family, old_prior = VARIANTS[variant]
        family = old_family if isinstance(posterior, Unspecified) else None if posterior == "none" else posterior
        if isinstance(prior, Unspecified):
            # soft attention has no prior: it is added with a posterior and dropped with it
            prior = None if family is None else "contextual" if old_family is None else old_prior
        code = _CODES.get((family, prior))
        if code is None:
            raise ValueError(
                f"{named} gives posterior {family!r} with prior {prior!r}, which is not supported. Combine 'weibull' with "
                "'contextual', 'fixed' or None, 'lognormal' with 'contextual' or 'fixed', or 'none' with None"
            )
        if is_code_given and code != variant:
            raise ValueError(f"variant is {variant!r}, but {named} makes it {code!r}. Give one or the other")
        return code

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
        """Whether a module needs the number of features per key, because its prior reads the keys."""
        return self.prior_kind == "contextual"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON or YAML."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "AttentionConfig":
        """Build a config from plain values; an unknown key is an error that lists the known ones."""
        known = [*(field.name for field in dataclasses.fields(cls)), "posterior", "prior"]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"AttentionConfig has no keys {unknown}. Its keys are {known}")
        # a file names every form; those equal to its preset's follow the preset, as in the config that was saved
        forms = PRESETS.get(values.get("preset", "default"), {})
        return cls(**{name: value for name, value in values.items() if name not in forms or forms[name] != value})
