"""The most doubtful predictions of a split in closed form, with where their doubt comes from, as tensors for a file."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from bayesattn.doubt import Uncertainty


@dataclass(frozen=True)
class DoubtfulExamples:
    """The predictions of a split with the smallest margin / std (`ba.uncertainty`), the most doubtful first.

    Attributes:
        examples: Their places in the split, `k`.
        margin: Difference of the two largest logits, `k`.
        std: Its standard deviation under attention noise, `k`.
        by_token: Variance by key, `k keys`.
        by_head: Variance by layer and head, `k layers heads`; 0 where a layer has fewer heads than another.
        words: What stands at the keys of each, where they are texts; keys beyond its words are padding.
    """

    examples: Tensor
    margin: Tensor
    std: Tensor
    by_token: Tensor
    by_head: Tensor
    words: list[list[str]] | None = None

    @classmethod
    def from_uncertainty(
        cls, examples: Int[Tensor, " k"], found: Uncertainty, words: Sequence[Sequence[str]] | None = None
    ) -> "DoubtfulExamples":
        """Keep what a report shows of these examples; `found` is of them alone, in their order."""
        if found.by_token is None or not found.by_head:
            raise ValueError("the doubt must have parts by token and head, got none. Use method='closed-form' on an encoder")
        heads = list(found.by_head.values())
        most = max(part.shape[1] for part in heads)
        by_head = torch.stack([torch.nn.functional.pad(part, (0, most - part.shape[1])) for part in heads], dim=1)
        return cls(
            *(part.detach().cpu() for part in (examples, found.margin, found.std, found.by_token)),
            by_head=by_head.detach().cpu(),
            words=None if words is None else [list(row) for row in words],
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def problem(self, num_examples: int) -> str | None:
        """Return why these cannot be of a split of `num_examples`; None where nothing is wrong."""
        count = len(self.examples) if self.examples.ndim == 1 else 0
        keys, layers_heads = self.by_token.shape[-1:], self.by_head.shape[1:]
        expected = {"examples": (count,), "margin": (count,), "std": (count,), "by_token": (count, *keys)}
        expected["by_head"] = (count, *layers_heads)
        shapes = {name: tuple(value.shape) for name, value in self.tensors().items()}
        if not count or shapes != expected or len(layers_heads) != 2:
            return f"shapes {shapes}"
        if self.examples.is_floating_point() or not 0 <= int(self.examples.min()) <= int(self.examples.max()) < num_examples:
            return f"examples {self.examples.tolist()} of {num_examples}"
        if not all(bool(torch.isfinite(value).all()) for value in self.tensors().values()):
            return "numbers that are not finite"
        words = self.words
        if words is not None and not (len(words) == count and all(0 < len(row) <= keys[0] for row in words)):
            return "another number of words than keys"
        return None
