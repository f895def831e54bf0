"""One image, word by word: the word, its uncertainty, and where the model attends (Figure 1 of the paper)."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int, UInt8
from matplotlib.figure import Figure
from torch import Tensor

from bayesattn.kl import record_kl
from bayesattn.metrics import entropy, top_two_p_value
from bayesattn.prediction import predict
from bayesattn.scalars import check_count
from bayesattn_recipes.captioning.batches import teacher_forced
from bayesattn_recipes.captioning.data import CaptionData, load_data
from bayesattn_recipes.captioning.decoding import beam_search
from bayesattn_recipes.captioning.model import Att2in
from bayesattn_recipes.captioning.train import CaptioningConfig, load_run, search_options
from bayesattn_recipes.captioning.vocabulary import BOUNDARY
from bayesattn_recipes.vision.features import read_regions
from bayesattn_recipes.vision.ids import find_name
from bayesattn_recipes.vision.images import read_image
from bayesattn_recipes.vision.overlay import plot_overlay
from bayesattn_recipes.vision.shapes import GRID, pixel_features


@dataclass(frozen=True)
class Subject:
    """An image to describe: its picture, the features of its regions, and their places."""

    picture: UInt8[Tensor, "height width 3"]
    regions: Float[Tensor, "n f"]
    grid: tuple[int, int] | None
    boxes: Float[Tensor, "n 4"] | None = None


@dataclass(frozen=True)
class Explanation:
    """A caption and the uncertainty and attention of each of its words, the end included.

    Attributes:
        words: The words; the last is `<end>` unless the caption was cut.
        probability: Probability of each word, given those before it: the mean over the draws, or that of the posterior mean.
        entropy: Entropy of that prediction, in nats.
        p_value: p-value of a paired t-test that its two most probable words differ; None without draws.
        maps: `mean` (the posterior mean of the weights), with draws `std`, and for contextual priors `prior`, whose one
            row all words share.
        drawn: What was drawn: `attention`, `dropout` or nothing.
    """

    words: list[str]
    probability: Float[Tensor, " t"]
    entropy: Float[Tensor, " t"]
    p_value: Float[Tensor, " t"] | None
    maps: dict[str, Float[Tensor, "_ n"]]
    drawn: str | None

    @property
    def sentence(self) -> str:
        """The caption."""
        return " ".join(word for word in self.words if not word.startswith("<"))


def find_subject(
    config: CaptioningConfig, image: str, data: Path | CaptionData | None = None, features: Path | None = None
) -> Subject:
    """Find the picture and its features.

    Features of the generated world are computed from any picture. Those of photos come from files, in which they are found
    by the file name of the picture.

    Args:
        config: Config of the run.
        image: The path of a picture, or the name of an image of the data set.
        data: The folder of the data sets, or the run's data set.
        features: A file of `bayesattn features` with this picture; for runs on photos.
    """
    path = Path(image)
    if config.dataset == "shapes":
        if features is not None:
            raise ValueError("leave out --features: a run on shapes computes them from the picture")
        found = read_image(path) if path.exists() else load_data("shapes").picture(image)
        return Subject(found, pixel_features(found.unsqueeze(0))[0], GRID)
    known = None
    if features is None:
        known = data if isinstance(data, CaptionData) else load_data(config.dataset, data)
    regions = known.regions if known is not None else read_regions(features)  # type: ignore[arg-type]
    name = find_name(path.name, regions.names)
    if name is None:
        raise ValueError(
            f"image {image!r} has no features here. Choose one of the {len(regions)} images that have some, or give a file "
            "of `bayesattn features` with this one (--features)"
        )
    row = regions.names.index(name)
    values, mask = regions.gather(torch.tensor([row]))
    picture = read_image(path) if known is None or path.exists() else known.picture(path.name)
    return Subject(picture, values[0][mask[0]], regions.grid, regions.boxes(row))


def caption_image(
    folder: Path, image: str, data: Path | None = None, features: Path | None = None, **options: int
) -> tuple[Subject, Explanation]:
    """Describe an image with a run; options as for `explain`, the rest as for `find_subject`."""
    config, model = load_run(folder)
    subject = find_subject(config, image, data, features)
    if subject.regions.shape[1] != model.region_embed.in_features:
        raise ValueError(
            f"the regions of {image!r} have {subject.regions.shape[1]} features, but the model was trained with "
            f"{model.region_embed.in_features}"
        )
    words = beam_search(model, subject.regions.unsqueeze(0), **search_options(config)).words[0]
    return subject, explain(model, subject.regions, words, **options)


def plot_explanation(subject: Subject, found: Explanation) -> Figure:
    """Draw prior, mean and deviation of the attention over the picture, one column per word (Figure 1 of the paper)."""
    shown = {name: values[: len(found.words)] for name, values in found.maps.items()}
    columns = [f"{word} {float(p):.2f}" for word, p in zip(found.words, found.probability)]
    return plot_overlay(
        subject.picture, shown, grid=subject.grid, boxes=subject.boxes, columns=columns, title=found.sentence
    )


@torch.no_grad()
def explain(
    model: Att2in, regions: Float[Tensor, "n f"], words: Int[Tensor, " t"], *, num_samples: int = 20, seed: int = 0
) -> Explanation:
    """Follow a caption word by word.

    What is drawn is the attention, or for a model with soft attention its dropout masks; with neither, nothing.

    Args:
        model: In eval mode.
        regions: Regions of one image.
        words: The caption; boundaries after its end.
        num_samples: Draws, at least 2.
        seed: Seed of the draws.
    """
    check_count("num_samples", num_samples, least=2)
    length = int((words != BOUNDARY).sum())
    words = words[: length + 1]  # with the end, unless the caption was cut
    inputs = {"regions": regions.unsqueeze(0), "words": teacher_forced(words.unsqueeze(0))}
    drawn = method_of(model)
    samples, weights = draw(model, inputs, "mean", 1, seed)
    maps = {"mean": weights[0, 0]}
    if drawn is not None:
        samples, weights = draw(model, inputs, drawn, num_samples, seed)
        maps["std"] = weights[:, 0].std(dim=0)
    samples = samples[:, 0]
    mean = samples.mean(dim=0)
    prior = prior_weights(model, regions.unsqueeze(0))
    if prior is not None:
        maps["prior"] = prior
    return Explanation(
        [model.vocabulary.words[int(word)] for word in words],
        mean.gather(1, words.unsqueeze(1)).squeeze(1),
        entropy(mean),
        None if drawn is None else top_two_p_value(samples),
        maps,
        drawn,
    )


@torch.no_grad()
def draw(
    model: Att2in, inputs: dict[str, Tensor], method: str, num_samples: int, seed: int
) -> tuple[Float[Tensor, "s b t v"], Float[Tensor, "s b t n"]]:
    """Return probabilities of the next words and the weights behind them, draws first; one "draw" for `mean`.

    Args:
        model: In eval mode.
        inputs: Arguments of its forward pass, one caption per image.
        method: `mean`, `attention` or `dropout`.
        num_samples: Draws.
        seed: Seed of the draws.
    """
    if method == "mean":
        logits, weights = model(**inputs, need_weights=True)
        return torch.softmax(logits.float(), dim=-1).unsqueeze(0), weights.unsqueeze(0)
    seen: list[Tensor] = []

    def logits_of(result: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(result[1])
        return result[0]

    arguments = {**inputs, "need_weights": True}
    drawn = predict(model, arguments, num_samples, seed, batch_dims=0, dropout=method == "dropout", output=logits_of)
    weights = torch.cat(seen)
    return drawn.samples, weights.view(num_samples, -1, *weights.shape[1:])


def method_of(model: Att2in) -> str | None:
    """Return what can be drawn from a model: its `attention`, else its `dropout` masks, else nothing."""
    if any(config.is_stochastic for config in (getattr(module, "config", None) for module in model.modules()) if config):
        return "attention"
    return "dropout" if model.dropout.p > 0.0 else None


@torch.no_grad()
def prior_weights(
    model: Att2in, regions: Float[Tensor, "b n f"], region_mask: Bool[Tensor, "b n"] | None = None
) -> Float[Tensor, "b n"] | None:
    """Return Ψ over the regions of each image, or None without a contextual prior."""
    # the prior is computed only if a KL is needed
    with record_kl():
        found = model.look(regions, region_mask).prepared[1]
    return None if found is None else found.flatten(1, 2).squeeze(1).exp()
