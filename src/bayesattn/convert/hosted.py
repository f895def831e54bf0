"""The Bayesian part of an attention module that keeps its own class: config, prior and switches, attached as a child."""

import json
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from bayesattn import functional, sensitivity
from bayesattn.config import AttentionConfig
from bayesattn.convert.masks import as_band
from bayesattn.functional.repeated import Repeated, repeated, signature
from bayesattn.nn import AttentionWeights, BayesianModule
from bayesattn.noise.streams import NoiseStream
from bayesattn.ops.attention import observers, reference
from bayesattn.ops.attention.support import INTERPRETED
from bayesattn.ops.prior.nodes import KeyPrior
from bayesattn.precision import as_autocast, upcast, without_autocast

CHILD_NAME = "bayes"
# kinds of calls that a module remembers: enough for the lengths of a data set
_MOST_KINDS = 1024
_NO_WEIGHTS = (None,) * 4


class HostedAttention(BayesianModule):
    """Samples attention for the module it is a child of.

    The config is stored in the state_dict as a buffer of JSON bytes. Every checkpoint of the host therefore holds it
    (`load_bayesian` reads it), and a checkpoint with another config is refused.

    Args:
        config: Variant, noise and prior; None where `weights` are given.
        key_dim: Features per key and head.
        num_heads: Number of key heads.
        name: Name of the module it is a child of, in its model.
        weights: An object that replaces softmax and average.
    """

    settings: Tensor

    def __init__(
        self,
        config: AttentionConfig | None,
        *,
        key_dim: int | None,
        num_heads: int,
        name: str,
        weights: AttentionWeights | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        # how to repeat each kind of call made so far; None for a kind that must be checked every time
        self._repeated: dict[tuple, Repeated | None] = {}
        self.register_buffer("settings", torch.empty(0, dtype=torch.uint8, device=device))
        self.init_bayesian(
            config, key_dim=key_dim, num_heads=num_heads, device=device, dtype=dtype, prior_name=name, weights=weights
        )
        # set from outside: one noise draw per sequence (`generate`), and the batch that windows were cut from
        self.stream: NoiseStream | None = None
        self.batch: Batch | None = None

    @property
    def config(self) -> AttentionConfig:
        """Variant, noise and prior."""
        return self._config

    @config.setter
    def config(self, value: AttentionConfig) -> None:
        self._config = value
        self._repeated.clear()
        self.settings = encode_settings(settings_of(self)).to(self.settings.device)

    @property
    def prior_key_dim(self) -> int | None:
        """Number of key features that the contextual prior was built for."""
        prior = self.bayes_prior
        return None if prior is None else prior.weight_in.shape[1]

    @property
    def wakes_dropout(self) -> bool:
        """Whether the host's dropout of weights is active even in eval mode."""
        has_own = self.bayes_weights is not None and self.bayes_weights.has_own_dropout
        return self.drops_in_eval and not self.training and not has_own

    def attend(
        self,
        query: Float[Tensor, "b h m d"],
        key: Float[Tensor, "b hk n d"],
        value: Float[Tensor, "b hk n dv"],
        *,
        mask: Bool[Tensor, "..."] | None,
        bias: Float[Tensor, "..."] | None,
        is_causal: bool,
        scale: float,
        dropout_p: float,
        softcap: float | None = None,
        need_weights: bool = False,
        key_offset: int = 0,
        window: int | None = None,
    ) -> tuple[Float[Tensor, "b h m dv"], Float[Tensor, "b h m n"] | None]:
        """Return output and, if asked for, weights of one draw; the KL goes to the open `record_kl()` scope.

        `key_offset` is the position of the first key in its sequence, if the cache of a sliding window has dropped earlier
        ones; it matters for noise that belongs to a sequence. `window` is the length of the host's window. The mask already
        contains it; the kernels get it as a number where the mask contains nothing else.
        """
        if self.is_observed:
            options = {"mask": mask, "bias": bias, "is_causal": is_causal, "scale": scale, "softcap": softcap}
            observers.note_attention(self, query, key, **options)
        if self.bayes_weights is not None:
            return self._attend_custom(
                query, key, value, mask=mask, bias=bias, is_causal=is_causal, scale=scale, softcap=softcap,
                dropout_p=dropout_p, need_weights=need_weights,
            )  # fmt: skip
        if softcap is None and self.stream is None and not need_weights:
            if bias is not None or is_causal or not (query.is_cuda or INTERPRETED):
                window = None
            elif mask is not None:
                mask, is_causal, window = as_band(mask, window)
            else:
                window = None
            output, kl = self._attend_fused(query, key, value, mask, bias, is_causal, window, scale, dropout_p)
            return self.record(output, kl), None
        with without_autocast(query.device.type):
            scores, mask = self._scores(query, key, mask, bias, is_causal, scale, softcap)
            weights = self.draw(scores, mask, key_offset)
            kl = self.kl(scores, key, mask) if self.needs_kl else None
            dropped = nn.functional.dropout(weights, dropout_p)
            output = reference.weighted_values(dropped, value)
        return self.record(output, kl), weights.to(query.dtype) if need_weights else None

    def _attend_fused(
        self, query, key, value, mask, bias, is_causal, window, scale, dropout_p
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return output and KL of one draw; a call like an earlier one reuses what was worked out then."""
        need_kl, sample = self.needs_kl, self.is_sampling
        # before the signature, so that a repeated call has the types of the call that was checked
        query, key, value = as_autocast(query, key, value)
        found = signature(query, key, value, mask) if sample and bias is None else None
        if found is not None:
            prior = self.bayes_prior if need_kl else None
            found = (*found, is_causal, window, scale, dropout_p, need_kl, None if prior is None else prior.signature())
            known = self._repeated.get(found)
            if known is not None:
                return known(query, key, value, mask, _NO_WEIGHTS if prior is None else prior.weights())
        log_prior = self._log_prior(key, mask, query.shape[1], need_kl=need_kl, may_wait=True)
        options = {
            "config": self.config, "log_prior": log_prior, "mask": mask, "is_causal": is_causal, "window": window,
            "scale": scale, "dropout_p": dropout_p, "need_kl": need_kl,
        }  # fmt: skip
        result = functional.attention(query, key, value, bias=bias, sample=sample, **options)
        if found is not None and found not in self._repeated:
            if len(self._repeated) >= _MOST_KINDS:
                self._repeated.clear()
            self._repeated[found] = repeated(query, key, value, **options)
        return result

    def _attend_custom(self, query, key, value, *, dropout_p, need_weights, **options) -> tuple[Tensor, Tensor | None]:
        """Attend as `attend` does, with the custom weights in place of the softmax."""
        if self.stream is not None:
            raise ValueError(
                f"weights are {self.bayes_weights.name!r}, whose noise is not tied to a sequence; generation works with "
                f"{', '.join(map(repr, AttentionConfig.allowed_variants))}"
            )
        with without_autocast(query.device.type):
            scores, mask = self._scores(query, key, **options)
        output, weights, kl = self.bayes_weights(scores, key, value, mask=mask, dropout_p=dropout_p)
        return self.record(output, kl), weights.to(query.dtype) if need_weights else None

    def finish_mean(
        self,
        output: Float[Tensor, "b _ _ dv"],
        query: Float[Tensor, "b h m d"],
        key: Float[Tensor, "b hk n d"],
        value: Float[Tensor, "b hk n dv"],
        *,
        mask: Bool[Tensor, "..."] | None,
        bias: Float[Tensor, "..."] | None,
        is_causal: bool,
        scale: float,
        softcap: float | None = None,
        heads_last: bool = False,
    ) -> Float[Tensor, "b _ _ dv"]:
        """Return the output that the host computed without sampling; add KL, sensitivity, statistics to the open scopes.

        With `heads_last` the output has its heads after the queries.
        """
        options = {"mask": mask, "bias": bias, "is_causal": is_causal, "scale": scale, "softcap": softcap}
        if self.is_observed:
            observers.note_attention(self, query, key, **options)
        if self.is_measured:
            output = sensitivity.through_attention(output, query, key, value, self, heads_last=heads_last, **options)
        if not self.needs_kl:
            return output
        with without_autocast(query.device.type):
            scores, mask = self._scores(query, key, mask, bias, is_causal, scale, softcap)
            kl = self.kl(scores, key, mask)
        return self.record(output, kl)

    def _scores(self, query, key, mask, bias, is_causal, scale, softcap) -> tuple[Tensor, Tensor | None]:
        scores = reference.dot_product_scores(query, key, scale=scale, bias=None)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + upcast(bias)
        if is_causal:
            causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            mask = causal if mask is None else mask & causal
        return scores, mask

    def draw(self, scores: Float[Tensor, "b h m n"], mask: Tensor | None, key_offset: int) -> Float[Tensor, "b h m n"]:
        """Return the weights of one draw, or their mean while nothing is sampled; `key_offset` as for `attend`."""
        options = {"config": self.config, "sample": self.is_sampling, "need_kl": False}
        if self.stream is None:
            return functional.attention_weights(scores, mask=mask, **options)[0]
        # one seed per query row: with rows on the batch axis, the noise of a row does not depend on the other rows
        b, h, m, n = scores.shape
        rows = scores.transpose(1, 2).reshape(b * m, h, 1, n)
        if mask is None:
            mask = torch.ones(n, dtype=torch.bool, device=scores.device)
        mask = mask.expand(b, mask.shape[-3] if mask.ndim > 2 else 1, m, n).transpose(1, 2).flatten(0, 1).unsqueeze(2)
        # keys that a cache dropped keep their place in the numbering of the noise
        rows, mask = (nn.functional.pad(x, (key_offset, 0)) for x in (rows, mask))
        weights, _ = functional.attention_weights(rows, mask=mask, seed=self.stream.row_seeds(self, b, m), **options)
        return weights[..., key_offset:].reshape(b, m, h, n).transpose(1, 2)

    def kl(self, scores: Float[Tensor, "b h m n"], key: Tensor, mask: Tensor | None) -> Float[Tensor, " b"] | None:
        """Return the KL of each entry of the batch; 0 for variants without one."""
        log_prior = self._log_prior(key, mask, scores.shape[1])
        log_prior = log_prior.log_prior() if isinstance(log_prior, KeyPrior) else log_prior
        return functional.attention_weights(scores, config=self.config, log_prior=log_prior, mask=mask, sample=False)[1]

    def _log_prior(
        self,
        key: Float[Tensor, "b hk n d"],
        mask: Tensor | None,
        num_heads: int,
        *,
        need_kl: bool = True,
        may_wait: bool = False,
    ) -> Float[Tensor, "b h 1 n"] | KeyPrior | None:
        """Return ln Ψ of the keys that some query may attend to, for every query head; None if the KL is not needed.

        With `may_wait`, return it uncomputed if the kernels can compute it themselves.
        """
        if self.bayes_prior is None or not need_kl:
            return None
        key_heads, valid = key.shape[1], None
        if mask is not None:
            mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
            valid = mask.squeeze(-2) if mask.shape[-2] == 1 else mask.any(dim=-2)
            if valid.shape[1] not in (1, key_heads):
                # a mask per query head, keys shared by groups of them: a key counts if any head of its group may attend to
                # it
                valid = valid.unflatten(1, (key_heads, -1)).any(dim=2)
            valid = valid.expand(*valid.shape[:2], key.shape[2])
        if may_wait and num_heads == key_heads:
            fused = self.bayes_prior.fused(key, valid)
            if fused is not None:
                return fused
        prior = self.bayes_prior(key, valid)
        return prior if num_heads == key_heads else prior.repeat_interleave(num_heads // key_heads, dim=1)

    def record(self, output: Tensor, kl: Float[Tensor, " w"] | None) -> Tensor:
        """Record the KL per example of the model; an example may have become several entries of the batch (windows)."""
        examples = None if self.batch is None else self.batch.examples
        if kl is not None and examples is not None and kl.shape[0] > examples and kl.shape[0] % examples == 0:
            parts = kl.view(examples, -1)
            kl = parts.sum(dim=1) if self.kl_reduction == "sum" else parts.mean(dim=1)
        return super().record(output, kl)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_repeated": {}}

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        stored = state_dict.get(f"{prefix}settings")
        if stored is None:
            state_dict[f"{prefix}settings"] = self.settings
        elif (theirs := decode_settings(stored)) != (own := settings_of(self)):
            differing = [key for key in sorted({*theirs, *own}) if theirs.get(key) != own.get(key)]
            given, expected = ({key: values.get(key) for key in differing} for values in (theirs, own))
            error_msgs.append(
                f"{prefix}settings: the checkpoint's attention is {given}, the model's is {expected}; convert the model "
                "with the checkpoint's config, or use load_bayesian"
            )
            state_dict[f"{prefix}settings"] = self.settings
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


class Batch:
    """Notes the number of examples in a call: windows (Swin) or channels (PatchTST) become several entries of a batch.

    `note` is registered as a forward pre-hook of the model that cuts them, `note_whole` as one of the outermost model around
    that, which may flatten the choices of a question into the batch.
    """

    def __init__(self) -> None:
        self.examples: int | None = None
        self.whole: int | None = None

    def note(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """Remember the first axis of the first tensor among the model's inputs."""
        self.examples = _first_axis(args, kwargs)

    def note_whole(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """Remember the same of the outermost model."""
        self.whole = _first_axis(args, kwargs)


def _first_axis(args: tuple, kwargs: dict) -> int | None:
    sizes = (value.shape[0] for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim > 0)
    return next(sizes, None)


def settings_of(part: BayesianModule) -> dict[str, Any]:
    """Return plain values that describe a Bayesian module: its config, or under `weights` the settings of custom weights."""
    return part.config.to_dict() if part.bayes_weights is None else {"weights": part.bayes_weights.settings()}


def encode_settings(values: dict[str, Any]) -> Tensor:
    """Return plain values as a tensor of JSON bytes."""
    return torch.frombuffer(bytearray(json.dumps(values, sort_keys=True).encode()), dtype=torch.uint8)


def decode_settings(settings: Tensor) -> dict[str, Any]:
    """Return the values that `encode_settings` encoded."""
    return json.loads(bytes(settings.tolist()).decode())
