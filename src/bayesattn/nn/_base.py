"""What every Bayesian attention module shares: a config, a prior, a sampling switch and a name for its KL."""

import torch
from torch import Tensor, nn

from bayesattn.config import AttentionConfig
from bayesattn.priors import ContextualPrior
from bayesattn.recording import is_recording, record

PRIOR_NAME = "bayes_prior"


class BayesianModule(nn.Module):
    """Mixin for modules that sample attention weights.

    `train()` samples; `eval()` gives the posterior mean, which is the deterministic module, unless `sampling(model)`
    switches the draws on.
    """

    config: AttentionConfig
    bayes_prior: ContextualPrior | None
    # both are set from outside: by `sampling(model)`, and by `record_kl(model)`
    samples_in_eval: bool
    drops_in_eval: bool
    kl_name: str

    def _init_bayesian(
        self,
        config: AttentionConfig,
        *,
        key_dim: int | None,
        num_heads: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(config, AttentionConfig):
            raise ValueError(f"config is {type(config).__name__}; allowed: an AttentionConfig")
        self.config = config
        self.samples_in_eval = False
        self.drops_in_eval = False
        self.kl_name = type(self).__name__
        self.bayes_prior = None
        if config.prior_kind == "contextual":
            if key_dim is None:
                raise ValueError(f"key_dim is None; allowed for {config.variant}: the number of features of a key")
            self.bayes_prior = ContextualPrior(key_dim, num_heads, config, device=device, dtype=dtype)

    @property
    def is_sampling(self) -> bool:
        """Whether the next call draws its weights."""
        return self.config.is_stochastic and (self.training or self.samples_in_eval)

    @property
    def needs_kl(self) -> bool:
        """Whether the next call's KL reaches anyone."""
        return self.config.has_kl and is_recording(self)

    def _dropout(self, p: float) -> float:
        return p if self.training or self.drops_in_eval else 0.0

    def _record(self, output: Tensor, kl: Tensor | None) -> Tensor:
        return output if kl is None else record(output, kl, self)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        # a checkpoint of the deterministic module knows no prior: keep the fresh one. A partial prior stays an error.
        prior_prefix = f"{prefix}{PRIOR_NAME}."
        if self.bayes_prior is not None and not any(key.startswith(prior_prefix) for key in state_dict):
            state_dict.update({f"{prior_prefix}{key}": value for key, value in self.bayes_prior.state_dict().items()})
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
