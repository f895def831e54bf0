"""One frozen dataclass that says which Bayesian attention is meant, with named presets for its conventions."""

import dataclasses
import math
from dataclasses import InitVar, dataclass
from enum import Enum
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from bayesattn.numbers import check_positive

Family = Literal["weibull", "lognormal"]
Posterior = Literal["none", "weibull", "lognormal"]
PriorKind = Literal["fixed", "contextual"]
Variant = Literal["soft", "BAM-NOKL", "BAM-LF", "BAM-LC", "BAM-WF", "BAM-WC"]
Preset = Literal["paper", "official-code", "default"]
ScoreForm = Literal["raw", "log_softmax"]
AlphaForm = Literal["psi", "beta_psi"]
MuForm = Literal["psi", "log_psi"]
KLReduction = Literal["sum", "row_mean", "mean"]

# variant: posterior family, prior kind (None: no KL). `soft` has no noise at all.
# the field that says how much noise a family has
NOISE_FIELD: dict[str, str] = {"weibull": "weibull_k", "lognormal": "sigma_q"}
VARIANTS: dict[Variant, tuple[Family | None, PriorKind | None]] = {
    "soft": (None, None),
    "BAM-NOKL": ("weibull", None),
    "BAM-LF": ("lognormal", "fixed"),
    "BAM-LC": ("lognormal", "contextual"),
    "BAM-WF": ("weibull", "fixed"),
    "BAM-WC": ("weibull", "contextual"),
}

# the same the other way round
_CODES = {pair: variant for variant, pair in VARIANTS.items()}
# an object of its own, equal to the code: tells `AttentionConfig()` from `AttentionConfig("BAM-WC")`
DEFAULT_VARIANT: Any = str(b"BAM-WC", "ascii")

# the conventions on which the paper, its code and this library differ; docs/deviations.md gives the reasons
PRESETS: dict[Preset, dict[str, str]] = {
    "paper": {"score_form": "raw", "alpha_form": "psi", "mu_form": "psi", "kl_reduction": "sum"},
    "official-code": {"score_form": "log_softmax", "alpha_form": "beta_psi", "mu_form": "log_psi", "kl_reduction": "mean"},
    "default": {"score_form": "log_softmax", "alpha_form": "beta_psi", "mu_form": "log_psi", "kl_reduction": "row_mean"},
}

# copies, so that a value from a preset can be told from the same value written by a user
_FILLED = {preset: {name: str(form.encode(), "ascii") for name, form in forms.items()} for preset, forms in PRESETS.items()}

CHOICES: dict[str, tuple[str, ...]] = {
    "variant": get_args(Variant),
    "preset": get_args(Preset),
    "score_form": get_args(ScoreForm),
    "alpha_form": get_args(AlphaForm),
    "mu_form": get_args(MuForm),
    "kl_reduction": get_args(KLReduction),
}


class Unspecified(Enum):
    """An argument that was not given, where None means something."""

    TOKEN = "unspecified"


class _Origin(NamedTuple):
    """What `dataclasses.replace` cannot tell from its arguments: the old variant, and the forms its preset filled in."""

    variant: str
    filled: dict[str, str]


@dataclass(frozen=True)
class AttentionConfig:
    """What is random about the attention weights, and what they are pulled towards.

        AttentionConfig(posterior="weibull", prior="contextual")  ==  AttentionConfig("BAM-WC")

    The default numbers and the `default` preset are those that trained well in the recipes, found on validation data
    (docs/deviations.md); the paper's own settings are in the configs of each recipe.

    `dataclasses.replace(config, preset=...)` changes the forms that came from the old preset and keeps those that were
    given. `replace` takes `variant`, or `posterior` and `prior`, too.

    Args:
        variant: The paper's code: `soft`, `BAM-NOKL`, or `BAM-` with L(ognormal) or W(eibull) posterior and F(ixed) or
            C(ontextual) prior. Or give the next two. Without any of the three it is `BAM-WC`.
        posterior: Distribution of the unnormalised weights: `weibull`, `lognormal`, or `none` (or None) for soft attention.
            Read it as `config.family`.
        prior: What the KL pulls towards: a `contextual` prior, computed from the keys, a `fixed` one, or None for no KL.
            Read it as `config.prior_kind`.
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

    # a subclass that knows more variants lists them here
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
    # only `dataclasses.replace` gives it, from the attribute of this name
    _origin: InitVar[_Origin | None] = None

    def __post_init__(
        self,
        posterior: Posterior | Unspecified | None,
        prior: PriorKind | Unspecified | None,
        _origin: _Origin | None,
    ) -> None:
        object.__setattr__(self, "variant", self._code(posterior, prior, _origin))
        choices = {**CHOICES, "variant": self.allowed_variants}
        _check_choice("preset", self.preset, choices["preset"])
        filled = {}
        for name, value in _FILLED[self.preset].items():
            given = getattr(self, name)
            if given is None or (_origin is not None and given is _origin.filled.get(name)):
                filled[name] = value
                object.__setattr__(self, name, value)
        for name, allowed in choices.items():
            _check_choice(name, getattr(self, name), allowed)
        for name in PRESETS[self.preset].keys() - filled.keys():
            # the plain string, whatever config it was read from
            object.__setattr__(self, name, next(choice for choice in choices[name] if choice == getattr(self, name)))
        object.__setattr__(self, "_origin", _Origin(self.variant, filled))
        for name in ("weibull_k", "gamma_alpha", "gamma_beta", "sigma_q", "sigma_p"):
            value = getattr(self, name)
            check_positive(**{name: value})
            object.__setattr__(self, name, float(value))
        if not isinstance(self.mu_p, int | float) or not math.isfinite(self.mu_p):
            raise ValueError(f"mu_p is {self.mu_p!r}; allowed: a finite number")
        if not isinstance(self.prior_hidden_dim, int) or self.prior_hidden_dim < 1:
            raise ValueError(f"prior_hidden_dim is {self.prior_hidden_dim!r}; allowed: an integer of at least 1")

    def _code(
        self, posterior: Posterior | Unspecified | None, prior: PriorKind | Unspecified | None, origin: _Origin | None
    ) -> str:
        """Return the code of what was given: a code, or posterior and prior."""
        is_code_given = self.variant is not DEFAULT_VARIANT if origin is None else self.variant != origin.variant
        given = {"posterior": posterior, "prior": prior}
        given = {name: value for name, value in given.items() if not isinstance(value, Unspecified)}
        _check_choice("variant", self.variant, self.allowed_variants)
        if not given:
            return next(variant for variant in self.allowed_variants if variant == self.variant)
        for name, kinds in (("posterior", get_args(Posterior)), ("prior", get_args(PriorKind))):
            _check_choice(name, given.get(name), (*kinds, None))
        named = ", ".join(f"{name}={value!r}" for name, value in given.items())
        if self.variant not in VARIANTS:
            raise ValueError(f"variant is {self.variant!r}, which has no {named}; give one or the other")
        old_family, old_prior = VARIANTS[self.variant]
        family = old_family if isinstance(posterior, Unspecified) else None if posterior == "none" else posterior
        if isinstance(prior, Unspecified):
            # from soft attention to a posterior, and back, the prior comes and goes
            prior = None if family is None else "contextual" if old_family is None else old_prior
        code = _CODES.get((family, prior))
        if code is None:
            raise ValueError(
                f"{named} gives posterior {family!r} with prior {prior!r}; allowed: 'weibull' with 'contextual', 'fixed' or "
                "None, 'lognormal' with 'contextual' or 'fixed', 'none' with None"
            )
        if is_code_given and code != self.variant:
            raise ValueError(f"variant is {self.variant!r}, and {named} makes it {code!r}; give one or the other")
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
        """Whether a module needs to know the features of a key: its prior reads them."""
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
            raise ValueError(f"unknown AttentionConfig keys {unknown}; allowed: {known}")
        # a file names every form; those of its preset follow the preset, as in the config that was saved
        forms = PRESETS.get(values.get("preset", "default"), {})
        return cls(**{name: value for name, value in values.items() if name not in forms or forms[name] != value})


# a bare tuple: for `tuple[str, ...]` the tests' type checker draws an entry from Python's generator, in a hot place
def _check_choice(name: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")
