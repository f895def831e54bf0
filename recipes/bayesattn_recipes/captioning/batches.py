"""Captions as numbers, and batches of them: words, the regions of their images, and the words to predict.

A batch has the length of its longest caption, the regions of its largest image, and logits for words that exist. On a
GPU a training step is recorded once for every shape of batch, and such batches have too many shapes: `pad_batch` reduces
them to a few.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bayesattn_recipes.captioning.data import CaptionData, CaptionSplit
from bayesattn_recipes.captioning.vocabulary import BOUNDARY, UNKNOWN, Vocabulary

# target of a step without a word to predict: torch's cross-entropy and its gradient are 0 there
NO_TARGET = -100
# images, and regions if their number differs between images, are rounded up to multiples of these; with five captions per
# image, batches of 50 or 250 captions are multiples already
IMAGE_MULTIPLE, REGION_MULTIPLE = 5, 16
# words to predict are rounded up to a multiple of this share of all steps: a batch of many captions is always close to
# the same share, and logits of steps without a word would cost as much as the others
STEP_SHARE = 8


@dataclass(frozen=True)
class EncodedCaptions:
    """The captions of a split as numbers.

    Attributes:
        words: Words of each caption, with a boundary after the last; boundaries fill the rest.
        lengths: Words and their boundary.
        images: Which image of the split each caption is about; captions of an image are consecutive.
        num_skipped: Captions left out because they contain no known word.
    """

    words: Int[Tensor, "c t"]
    lengths: Int[Tensor, " c"]
    images: Int[Tensor, " c"]
    num_skipped: int


def encode_captions(split: CaptionSplit, vocabulary: Vocabulary, max_length: int) -> EncodedCaptions:
    """Turn captions into numbers; one without any known word is skipped and counted."""
    rows, images, skipped = [], [], 0
    for image, captions in enumerate(split.captions):
        for caption in captions:
            numbers = vocabulary.encode(caption, max_length)
            if all(number == UNKNOWN for number in numbers):
                skipped += 1
                continue
            rows.append(torch.tensor([*numbers, BOUNDARY]))
            images.append(image)
    if not rows:
        raise ValueError(f"none of the {skipped} captions holds a known word. Lower min_count so that some words are kept")
    lengths = torch.tensor([len(row) for row in rows])
    words = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=BOUNDARY)
    return EncodedCaptions(words, lengths, torch.tensor(images), skipped)


def teacher_forced(words: Int[Tensor, "c t"]) -> Int[Tensor, "c t"]:
    """Return the word before each word: the words shifted by one step, after a boundary."""
    return torch.cat([torch.full_like(words[:, :1], BOUNDARY), words[:, :-1]], dim=1)


def make_batch(
    data: CaptionData, split: CaptionSplit, captions: EncodedCaptions, indices: Int[Tensor, " c"]
) -> dict[str, Tensor]:
    """Return the arguments of `Att2in.forward` for these captions, and `targets`, the words at its `positions`.

    The features of an image appear once, however many of its captions are in the batch. Lengths are turned into positions
    here, on the host, so nothing waits for the device later.
    """
    images, image_rows = captions.images[indices].unique(return_inverse=True)
    regions, region_mask = data.regions.gather(split.rows[images])
    lengths = captions.lengths[indices]
    words = captions.words[indices, : int(lengths.max())]
    positions = (torch.arange(words.shape[1]) < lengths[:, None]).flatten().nonzero().squeeze(1)
    return {
        "regions": regions,
        "region_mask": region_mask,
        "words": teacher_forced(words),
        "image_rows": image_rows,
        "lengths": lengths,
        "positions": positions,
        "targets": words.flatten()[positions],
    }


def pad_batch(batch: dict[str, Tensor], num_steps: int) -> dict[str, Tensor]:
    """Return a batch of the same likelihood, padded to one of a few shapes.

    All captions get the same number of steps. Steps after an end fill up the positions, without a target. Padding images
    have one existing region each, so that nothing divides by zero, and no caption.

    Args:
        batch: From `make_batch`.
        num_steps: Number of steps of the longest caption.
    """
    words = F.pad(batch["words"], (0, num_steps - batch["words"].shape[1]), value=BOUNDARY)
    has_word = (torch.arange(num_steps) < batch["lengths"][:, None]).flatten()
    share = -(-words.numel() // STEP_SHARE)
    places = torch.cat([has_word.nonzero(), (~has_word).nonzero()]).squeeze(1)
    positions = places[: -(-len(batch["targets"]) // share) * share]
    regions, region_mask = batch["regions"], batch["region_mask"]
    more_images = -len(regions) % IMAGE_MULTIPLE
    # every image has the same number of grid cells
    more_regions = 0 if bool(region_mask.all()) else -regions.shape[1] % REGION_MULTIPLE
    # padding by nothing would copy
    if more_images or more_regions:
        regions = F.pad(regions, (0, 0, 0, more_regions, 0, more_images))
        region_mask = F.pad(F.pad(region_mask, (0, more_regions), value=False), (0, 0, 0, more_images), value=True)
    return batch | {
        "regions": regions,
        "region_mask": region_mask,
        "words": words,
        "positions": positions,
        "targets": F.pad(batch["targets"], (0, len(positions) - len(batch["targets"])), value=NO_TARGET),
    }


def step_nll(model: nn.Module, batch: dict[str, Tensor]) -> Float[Tensor, "c t"]:
    """Return the cross-entropy of every step of every caption; 0 after its end."""
    arguments = {name: value for name, value in batch.items() if name != "targets"}
    losses = F.cross_entropy(model(**arguments), batch["targets"], reduction="none")
    empty = losses.new_zeros(batch["words"].numel())
    return empty.index_copy(0, batch["positions"], losses).view_as(batch["words"])
