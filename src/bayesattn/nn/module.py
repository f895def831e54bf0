"""The base of all Bayesian attention modules: a config, a prior, a sampling switch and a name for the KL."""

from typing import Any

import torch
from torch import Tensor, nn

from bayesattn import sensitivity
from bayesattn.config import AttentionConfig
from bayesattn.kl import is_recording, record
from bayesattn.nn.custom_weights import AttentionWeights, WeightsFactory, build_weights
from bayesattn.ops.attention import observers
from bayesattn.priors import ContextualPrior
from bayesattn.watch import PRIOR_NAME, WEIGHTS_NAME


def checked_config(config: AttentionConfig | None, weights: object) -> AttentionConfig:
    """Return the config of a module that is given either a config or custom weights; with the latter it is `soft`."""
    if (config is None) == (weights is None):
        advice = (
            '. Use AttentionConfig("BAM-NOKL") to draw from a trained model, AttentionConfig("BAM-WC") to train one from '
            "scratch; `uncertainty` needs no conversion"
        )
        raise ValueError(f"give either config or weights, got {f'neither{advice}' if config is None else 'both'}")
    if config is not None and not isinstance(config, AttentionConfig):
        raise ValueError(f"config must be an AttentionConfig, got {type(config).__name__}")
    return AttentionConfig("soft") if config is None else config


class BayesianModule(nn.Module):
    """Mixin for modules that sample attention weights.

    `train()` samples; `eval()` gives the posterior mean, which is the deterministic module, unless `sampling(model)`
    switches the draws on.

    Example:
        >>> import bayesattn as ba
        >>> attention = ba.nn.MultiheadAttention(8, 2, config=AttentionConfig("BAM-WC"))
        >>> isinstance(attention, BayesianModule), attention.is_sampling, attention.eval().is_sampling
        (True, True, False)
        >>> with ba.sampling(attention):
        ...     attention.is_sampling
        True
    """

    config: AttentionConfig
    bayes_prior: ContextualPrior | None
    # custom weights, which replace softmax and average; the config is then `soft`
    bayes_weights: Any
    # True in a subclass whose scores belong to edges
    on_edges: bool = False
    # both are set from outside: by `sampling(model)`, and by `record_kl(model)`
    samples_in_eval: bool
    drops_in_eval: bool
    kl_name: str

    def init_bayesian(
        self,
        config: AttentionConfig | None = None,
        *,
        key_dim: int | None,
        num_heads: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        prior_name: str = "",
        weights: AttentionWeights | WeightsFactory | None = None,
    ) -> None:
        """Give the module its config, its switches and, for contextual variants, a prior; constructors call it once.

        Args:
            config: Variant, noise and prior; None where `weights` are given.
            key_dim: Features per key and head; needed for contextual priors.
            num_heads: Number of key heads.
            device: Device of the prior's parameters.
            dtype: Type of the prior's parameters.
            prior_name: As `name` of `ContextualPrior`.
            weights: An object that replaces softmax and average (`nn/custom_weights.py`).
        """
        config = checked_config(config, weights)
        if config.prior_kind == "contextual" and key_dim is None:
            raise ValueError(f"key_dim must be the number of features of a key for {config.variant}, got None")
        custom = build_weights(weights, head_dim=key_dim, num_heads=num_heads, device=device, dtype=dtype)
        if custom is not None and self.on_edges and not custom.runs_on_edges:
            raise ValueError(f"weights must support edges (runs_on_edges) here, got {custom.name!r}, which do not")
        self.bayes_weights = custom
        self.config = config
        self.samples_in_eval = False
        self.drops_in_eval = False
        self.kl_name = type(self).__name__
        self.bayes_prior = None
        if config.prior_kind == "contextual":
            assert key_dim is not None
            self.bayes_prior = ContextualPrior(key_dim, num_heads, config, device, dtype, name=prior_name)

    @property
    def is_sampling(self) -> bool:
        """Whether the next call draws its weights."""
        return self.config.is_stochastic and (self.training or self.samples_in_eval)

    @property
    def needs_kl(self) -> bool:
        """Whether the KL of the next call will be recorded."""
        # in this order, because a scope also notes modules without a KL
        return is_recording(self) and self.config.has_kl

    @property
    def is_measured(self) -> bool:
        """Whether the next call adds itself to an open `score_sensitivity()` scope."""
        return sensitivity.is_open() and self.config.is_stochastic

    @property
    def is_observed(self) -> bool:
        """Whether the next call reports its statistics to an open `observe(model)` scope."""
        return observers.is_open() and not self.on_edges

    @property
    def is_idle(self) -> bool:
        """Whether the next call is plain deterministic attention: no draw, no KL, no open scope that observes it."""
        if self.bayes_weights is not None:
            return self.bayes_weights.is_idle
        return not (self.is_sampling or self.needs_kl or self.is_measured or self.is_observed)

    @property
    def kl_reduction(self) -> str | None:
        """How the KL of a call sums over queries and keys."""
        return self.config.kl_reduction if self.bayes_weights is None else self.bayes_weights.kl_reduction

    def __prepare_scriptable__(self) -> nn.Module:
        # torch.jit.script calls this. A plain module returned here would replace this one in the model
        raise RuntimeError(
            f"torch.jit.script cannot compile {type(self).__name__}: TorchScript supports neither configs nor draws. Use "
            "torch.jit.trace or torch.export on the model in eval mode, torch.compile to train it, or script a converted "
            "model after restore(model)"
        )

    def dropout_now(self, p: float) -> float:
        """Return the dropout rate of the next call: p in training and inside `sampling(model, dropout=True)`, else 0."""
        return p if self.training or self.drops_in_eval else 0.0

    def record(self, output: Tensor, kl: Tensor | None) -> Tensor:
        """Add the KL of one call (None without one) to the open `record_kl()` scope; use the returned output."""
        return record(output, kl, self)

    def __getstate__(self) -> dict[str, Any]:
        # the scope that switched these on switches them off in the original, but not in a copy
        return {**super().__getstate__(), "samples_in_eval": False, "drops_in_eval": False}

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        # a checkpoint of the deterministic module has no prior: keep the fresh one. A partial prior stays an error.
        for name, part in ((PRIOR_NAME, self.bayes_prior), (WEIGHTS_NAME, self.bayes_weights)):
            own = f"{prefix}{name}."
            if part is not None and not any(key.startswith(own) for key in state_dict):
                state_dict.update({f"{own}{key}": value for key, value in part.state_dict().items()})
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
