"""Captions for images: beam search over all images at once; a beam of one is greedy search.

Every image takes the same number of steps and the host never waits for the device: whether a caption has ended is a
tensor, and an ended caption goes on with boundaries of probability 1.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bayesattn_recipes.captioning.model import Att2in
from bayesattn_recipes.captioning.vocabulary import BOUNDARY, UNKNOWN


@dataclass(frozen=True)
class Captions:
    """The best caption of each image.

    Attributes:
        words: Numbers of the words; boundaries after the end.
        log_prob: ln of the probability of the words and, where the caption ended by itself, of its end.
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
    """Return the most probable caption that the beam finds; `UNKNOWN` is never said.

    Args:
        model: In eval mode, or under `sampling(model)`.
        regions: Features of the images' regions.
        region_mask: True for regions that exist.
        num_beams: Captions kept after each word; 1 is greedy.
        max_length: Words of a caption, at most.
        length_penalty: Captions compete by ln p / (words and end)^length_penalty: 0 by probability, 1 by its mean per word.
    """
    for name, value in (("num_beams", num_beams), ("max_length", max_length)):
        if value < 1:
            raise ValueError(f"{name} is {value!r}; allowed: an integer of at least 1")
    num_images, device = len(regions), regions.device
    num_words, width = model.head.out_features, num_beams
    first = torch.arange(num_images, device=device).unsqueeze(1) * width  # row of the first beam of each image
    image = model.look(regions, region_mask).select(torch.arange(num_images, device=device).repeat_interleave(width))
    state = model.start(image.keys)
    last = torch.full((num_images * width,), BOUNDARY, device=device)
    said = torch.full((num_images, width, max_length), BOUNDARY, device=device)
    # all beams are equal at first: only one of them may go on
    scores = torch.full((num_images, width), -torch.inf, device=device)
    scores[:, 0] = 0.0
    has_ended = torch.zeros(num_images, width, dtype=torch.bool, device=device)
    lengths = torch.zeros(num_images, width, device=device)
    only_boundary = torch.full((num_words,), -torch.inf, device=device)
    only_boundary[BOUNDARY] = 0.0
    for step in range(max_length):
        state, _ = model.step(model.read(last), state, image)
        logits = model.head(model.dropout(state[0])).float()
        logits[:, UNKNOWN] = -torch.inf
        log_probs = torch.log_softmax(logits, dim=-1).view(num_images, width, num_words)
        log_probs = torch.where(has_ended.unsqueeze(-1), only_boundary, log_probs)
        scores, chosen = (scores.unsqueeze(-1) + log_probs).flatten(1).topk(width, dim=1)
        parent, word = chosen // num_words, chosen % num_words
        lengths = lengths.gather(1, parent) + (~has_ended.gather(1, parent)).float()
        has_ended = has_ended.gather(1, parent) | (word == BOUNDARY)
        said = said.gather(1, parent.unsqueeze(-1).expand_as(said))
        said[:, :, step] = word
        rows, last = (first + parent).flatten(), word.flatten()
        state = (state[0].index_select(0, rows), state[1].index_select(0, rows))
    best = (scores / lengths**length_penalty).argmax(dim=1, keepdim=True)
    words = said.gather(1, best.unsqueeze(-1).expand(-1, 1, max_length)).squeeze(1)
    return Captions(words, scores.gather(1, best).squeeze(1))
