"""What `uncertainty` and `score` return."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bayesattn.doubt.predictive import averaged_probabilities
from bayesattn.metrics.significance import student_t_two_sided


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """A number per example, its standard deviation under attention noise, and where that comes from.

    The variance is a sum over all scores of all attention calls, so its parts add up to `std²`, except `by_token` of an
    encoder-decoder in `ba.score`: it leaves out the decoder's attention to its own text. The parts are empty where the
    deviation comes from draws.

    Attributes:
        value: The number d, of the model as it is.
        std: Its standard deviation.
        by_layer: Variance by attention module.
        by_head: Variance by attention module and head.
        by_token: Variance by key position, 0 at padding; for a graph, by the source node of the edges. None where modules
            attend to different sequences.
    """

    value: Float[Tensor, " b"]
    std: Float[Tensor, " b"]
    by_layer: Mapping[str, Float[Tensor, " b"]]
    by_head: Mapping[str, Float[Tensor, "b _"]]
    by_token: Float[Tensor, "b n"] | None

    @cached_property
    def t(self) -> Float[Tensor, " b"]:
        """Limit of the paper's paired t statistic over M draws, divided by √M: d / std. Its order ignores k and σ."""
        # std is 0 where the number depends on no score: t is infinite, unless the number is 0 as well
        still = torch.where(self.value == 0, 0.0, torch.copysign(torch.full_like(self.value, math.inf), self.value))
        return torch.where(self.std > 0, self.value / self.std, still)


@dataclass(frozen=True, kw_only=True)
class Uncertainty(Doubt):
    """How much to trust every prediction of a batch; returned by `ba.uncertainty`.

    Attributes:
        probabilities: Those of the model as it is; None for regressions and custom targets.
        label: The most probable class, or the (start, end) of the best span; None where there is neither.
        num_samples: M in the p-value.
        method: How `std` was computed: `closed-form`, `draws`, or `linearized` draws for many nodes of a graph.
        is_margin: Whether `value` is a margin: 0 means "undecided".
        classes: The most probable classes, in order; two unless `num_classes` asked for more.
        differences: The logit of the first of them minus those of the others.
        covariance: Covariance of these differences.

    Example:
        >>> parts = {"by_layer": {}, "by_head": {}, "by_token": None}
        >>> doubt = Uncertainty(value=torch.tensor([3.0, 0.5]), std=torch.tensor([1.0, 2.0]), **parts)
        >>> doubt.t, doubt.score.argsort(descending=True)  # the second is the less certain
        (tensor([3.0000, 0.2500]), tensor([1, 0]))
    """

    probabilities: Float[Tensor, "b k"] | None = None
    label: Int[Tensor, "b *two"] | None = None
    num_samples: int = 20
    method: str = "closed-form"
    is_margin: bool = True
    classes: Int[Tensor, "b c"] | None = None
    differences: Float[Tensor, "b others"] | None = None
    covariance: Float[Tensor, "b others others"] | None = None

    @property
    def margin(self) -> Float[Tensor, " b"]:
        """Difference of the two largest logits (or the number that `target` names)."""
        return self.value

    @cached_property
    def p_value(self) -> Float[Tensor, " b"]:
        """Return the paper's p-value: that of a paired t-test over M draws of the number, in the limit of small noise."""
        t = self.t.double() * math.sqrt(self.num_samples)
        return student_t_two_sided(t, torch.full_like(t, self.num_samples - 1.0))

    @cached_property
    def averaged_probabilities(self) -> Float[Tensor, "b c"]:
        """Class probabilities averaged over the noise, to first order; `tune_noise` chooses a noise that calibrates them."""
        if self.probabilities is None or self.classes is None or self.differences is None or self.covariance is None:
            raise ValueError("averaged probabilities exist only for target='margin' in closed form")
        return averaged_probabilities(self.probabilities, self.classes, self.differences, self.covariance)

    @cached_property
    def score(self) -> Float[Tensor, " b"]:
        """Score for ranking, higher is less certain: −t for a margin, the standard deviation for anything else."""
        return -self.t if self.is_margin else self.std


@dataclass(frozen=True, kw_only=True)
class SequenceScore(Doubt):
    """Log-probability of a given text and its standard deviation under attention noise; returned by `ba.score`.

    `by_token` is over the model's input tokens: the prompt of an encoder-decoder, the whole sequence of a causal model.

    Attributes:
        token_log_probabilities: That of every label, 0 where it is ignored; they add up to `log_probability`.
        num_tokens: Number of labels that are scored.

    Example:
        >>> tokens = torch.tensor([[0.0, -1.0, -2.0]])
        >>> parts = {"by_layer": {}, "by_head": {}, "by_token": None}
        >>> labels = {"token_log_probabilities": tokens, "num_tokens": torch.tensor([2])}
        >>> score = SequenceScore(value=tokens.sum(dim=1), std=torch.tensor([0.1]), **labels, **parts)
        >>> score.mean_log_probability
        tensor([-1.5000])
    """

    token_log_probabilities: Float[Tensor, "b t"]
    num_tokens: Int[Tensor, " b"]

    @property
    def log_probability(self) -> Float[Tensor, " b"]:
        """Log-probability of the whole text, in nats."""
        return self.value

    @property
    def mean_log_probability(self) -> Float[Tensor, " b"]:
        """Log-probability per scored token."""
        return self.value / self.num_tokens.clamp(min=1)
