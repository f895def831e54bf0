"""Does doubt rank generated sentences? Translations and captions, by their log-probability and its standard deviation.

The model decodes the test set as its recipe does. Every output y of T tokens, its end included, is then read again:

    d = (1/T) Σ_t ln p(y_t | y_<t, x),      and the standard deviation of d under attention noise, in closed form

which takes one forward and one backward pass. Whatever the recipe's search excludes is excluded here, too. Quality is
measured later, when the table is made: a machine that trains needs none of the scoring packages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import bayesattn as ba
from bayesattn.metrics import aurc
from bayesattn_recipes.captioning.batches import teacher_forced
from bayesattn_recipes.captioning.data import CaptionData, CaptionSplit
from bayesattn_recipes.captioning.decoding import beam_search
from bayesattn_recipes.captioning.model import Att2in
from bayesattn_recipes.captioning.scoring import image_cider
from bayesattn_recipes.captioning.vocabulary import BOUNDARY, UNKNOWN
from bayesattn_recipes.doubt.rankings import BASELINE, DEVIATION, Row
from bayesattn_recipes.translation.batches import Corpus, make_batch, token_batches
from bayesattn_recipes.translation.bleu import sentence_scores
from bayesattn_recipes.translation.draws import decode
from bayesattn_recipes.translation.measure import rank_correlation
from bayesattn_recipes.translation.model import Translator, evaluation_tokens
from bayesattn_recipes.translation.vocabulary import END, Vocabulary

# the best value of every measure of quality; CIDEr is ten times a mean of cosines
MOST = {"BLEU": 1.0, "chrF": 1.0, "CIDEr": 10.0}
IMAGES_PER_PASS = 250


@dataclass(frozen=True)
class Sentences:
    """A model's outputs for a test set, as plain values.

    Attributes:
        texts: Its outputs.
        num_tokens: T.
        log_probabilities: d, the mean per token.
        deviations: The standard deviation of d.
    """

    texts: list[str]
    num_tokens: list[int]
    log_probabilities: list[float]
    deviations: list[float]


def of_translations(model: Translator, vocabulary: Vocabulary, sources: Sequence[str]) -> Sentences:
    """Translate sentences with the recipe's beam search and measure every translation.

    Args:
        model: In eval mode, with noise in its attention.
        vocabulary: Vocabulary of its run.
        sources: The sentences.
    """
    device = next(model.parameters()).device
    encoded = [[*tokens, END] for tokens in vocabulary.encode(sources)]
    best = decode(model, encoded)
    targets = [[*tokens, END] for tokens in best]
    found = torch.zeros(len(encoded), 2, dtype=torch.float64)
    for indices in token_batches(Corpus(encoded, targets), evaluation_tokens(model)):
        chosen = indices.tolist()
        batch = make_batch([encoded[i] for i in chosen], [targets[i] for i in chosen])
        inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        lengths = torch.tensor(batch["target_lengths"], device=device)
        # the model returns the loss of every token, 0 at padding
        doubt = ba.uncertainty(model, inputs, target=lambda nll, lengths=lengths: -nll.sum(dim=1) / lengths)
        found[indices] = torch.stack([doubt.value, doubt.std], dim=1).double().cpu()
    texts, counts = [vocabulary.decode(tokens) for tokens in best], [len(tokens) for tokens in targets]
    return Sentences(texts, counts, *found.T.tolist())


def of_captions(model: Att2in, data: CaptionData, split: CaptionSplit, search: Mapping[str, Any]) -> Sentences:
    """Describe images with the recipe's beam search and measure every caption.

    Args:
        model: In eval mode, with noise in its attention.
        data: Holds the regions.
        split: The images.
        search: Options of `beam_search`.
    """
    device, parts = next(model.parameters()).device, []
    for rows in split.rows.split(IMAGES_PER_PASS):
        regions, mask = (part.to(device) for part in data.regions.gather(rows))
        words = beam_search(model, regions, mask, **search).words
        # a caption of the greatest length has no end
        lengths = (words != BOUNDARY).sum(dim=1) + (words == BOUNDARY).any(dim=1)
        steps = torch.arange(words.shape[1], device=device) < lengths[:, None]
        inputs = {"regions": regions, "words": teacher_forced(words), "region_mask": mask, "lengths": lengths}
        doubt = ba.uncertainty(model, inputs, target=_mean_log_probability(words, steps))
        parts.append((words.cpu(), lengths.cpu(), doubt.value.double().cpu(), doubt.std.double().cpu()))
    words, lengths, values, deviations = (torch.cat(column) for column in zip(*parts, strict=True))
    texts = [" ".join(model.vocabulary.decode(row)) for row in words.tolist()]
    return Sentences(texts, lengths.tolist(), values.tolist(), deviations.tolist())


def _mean_log_probability(words: Int[Tensor, "b t"], steps: Bool[Tensor, "b t"]) -> Callable[[Tensor], Tensor]:
    def of(logits: Float[Tensor, "b t v"]) -> Float[Tensor, " b"]:
        # the search never outputs an unknown word
        known = logits.index_fill(2, torch.tensor([UNKNOWN], device=logits.device), -torch.inf)
        logs = torch.log_softmax(known, dim=-1).gather(2, words.unsqueeze(2)).squeeze(2)
        return torch.where(steps, logs, 0.0).sum(dim=1) / steps.sum(dim=1)

    return of


def orders(sentences: Sentences) -> dict[str, Float[Tensor, " n"]]:
    """Return the rankings, higher is more certain: d, its sum over tokens, −std, and two ways to put d and std together.

    d is never positive. Its ratio to std is taken as that of a margin: the larger |t|, the more certain. But a certain
    sentence has a small |d| and a small std, and these cancel in the ratio; in the product they do not.
    """
    d, std = torch.tensor(sentences.log_probabilities).double(), torch.tensor(sentences.deviations).double()
    return {
        BASELINE: d,
        "total log-probability": d * torch.tensor(sentences.num_tokens),
        DEVIATION: -std,
        "log-probability / deviation": d.abs() / std.clamp(min=1e-30),
        "log-probability × deviation": d * std,
    }


def translation_quality(sentences: Sentences, references: Sequence[str]) -> dict[str, Float[Tensor, " n"]]:
    """Return BLEU (of the orders a sentence has, smoothed) and chrF of every sentence, by sacrebleu, from 0 to 1."""
    scores = sentence_scores(sentences.texts, references)
    return {"BLEU": torch.tensor(scores["bleu"]).double() / 100.0, "chrF": torch.tensor(scores["chrf"]).double() / 100.0}


def caption_quality(sentences: Sentences, references: Sequence[Sequence[str]]) -> dict[str, Float[Tensor, " n"]]:
    """Return CIDEr of every image after the plain tokenizer, so that machines with and without Java agree; from 0 to 10."""
    return {"CIDEr": torch.tensor(image_cider(sentences.texts, references)).double()}


def measure(sentences: Sentences, quality: Mapping[str, Float[Tensor, " n"]]) -> list[Row]:
    """Return rows: mean quality, the rank correlation of every order with it, and the mean quality of what is kept.

    The last is averaged over all shares kept, the most certain first: 1 − AURC with 1 − quality as the risk.
    """
    rows: list[Row] = []
    for name, values in quality.items():
        rows.append({"row": "all", "measure": f"mean {name}", "value": float(values.mean())})
        share = (values / MOST[name]).clamp(0.0, 1.0)
        for order, certainty in orders(sentences).items():
            correlation = rank_correlation((-certainty).tolist(), values.tolist())
            kept = MOST[name] * (1.0 - float(aurc(certainty, share)))
            rows.append({"row": order, "measure": f"Spearman with {name}", "value": correlation})
            rows.append({"row": order, "measure": f"{name} of the kept", "value": kept})
    return rows
