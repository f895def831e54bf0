"""Captions for images: beam search over all images at once; a beam of one is greedy search."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bayesattn_recipes.captioning.model import Att2in
from bayesattn_recipes.captioning.vocabulary import BOUNDARY, UNKNOWN
from bayesattn_recipes.common.beam import Marks, check_sizes, steady_beam_search

# hidden state and cell of every hypothesis
Beams = tuple[Float[Tensor, "b k d"], Float[Tensor, "b k d"]]
MARKS = Marks(start=BOUNDARY, end=BOUNDARY, pad=BOUNDARY)


@dataclass(frozen=True)
class Captions:
    """The best caption of each image.

    Attributes:
        words: Numbers of the words; boundaries after the end.
        log_prob: ln of the probability of the words and, if the caption ended by itself, of its end.
    """

    words: Int[Tensor, "b t"]
    log_prob: Float[Tensor, " b"]


@torch.no_grad()
def beam_search(
    model: Att2in,
    regions: Float[Tensor, "b n f"],
    region_mask: Bool[Tensor, "b n"] | None = None,
    *,
    num_beams: int = 1,
    max_length: int = 16,
    length_penalty: float = 0.0,
) -> Captions:
    """Return the most probable caption that the beam finds; `UNKNOWN` is never generated.

    Args:
        model: In eval mode, or under `sampling(model)`.
        regions: Features of the images' regions.
        region_mask: True for regions that exist.
        num_beams: Captions kept after each word; 1 is greedy.
        max_length: Words of a caption, at most.
        length_penalty: Captions compete by ln p / (words and end)^length_penalty: 0 uses ln p itself, 1 its mean per word.
    """
    check_sizes(num_beams, max_length)
    num_images, device = len(regions), regions.device
    image = model.look(regions, region_mask).select(torch.arange(num_images, device=device).repeat_interleave(num_beams))

    def next_log_probs(last: Int[Tensor, "b k"], state: Beams) -> tuple[Float[Tensor, "b k v"], Beams]:
        hidden, cell = (value.flatten(0, 1) for value in state)
        logits, (hidden, cell) = model.next_logits(last.flatten(), (hidden, cell), image)
        logits = logits.float()
        logits[:, UNKNOWN] = -torch.inf
        log_probs = torch.log_softmax(logits, dim=-1).view(num_images, num_beams, -1)
        return log_probs, (hidden.unflatten(0, (-1, num_beams)), cell.unflatten(0, (-1, num_beams)))

    hidden, cell = (value.unflatten(0, (-1, num_beams)) for value in model.start(image.keys))
    found = steady_beam_search(
        next_log_probs, (hidden, cell), marks=MARKS, batch=num_images, beam=num_beams, max_length=max_length,
        penalty=length_penalty, device=device,
    )  # fmt: skip
    return Captions(found.tokens.squeeze(1), found.scores.squeeze(1))
