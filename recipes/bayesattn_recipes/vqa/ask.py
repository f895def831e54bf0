"""One question about one picture: answer, probability, p-value, and where the model attended."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from bayesattn.metrics import top_two_p_value
from bayesattn.prediction import predict
from bayesattn.scalars import check_count
from bayesattn_recipes.common.figures import write_figure
from bayesattn_recipes.common.prediction import usual_method
from bayesattn_recipes.vision.features import Regions, read_regions
from bayesattn_recipes.vision.ids import find_name
from bayesattn_recipes.vision.images import read_image
from bayesattn_recipes.vision.overlay import plot_overlay
from bayesattn_recipes.vision.shapes import GRID, pixel_features
from bayesattn_recipes.vqa.attend import attention_maps
from bayesattn_recipes.vqa.data import FOLDERS, find_pictures, load_splits
from bayesattn_recipes.vqa.evaluate import available_methods
from bayesattn_recipes.vqa.model import MCAN
from bayesattn_recipes.vqa.train import VQAConfig, load_run


@dataclass(frozen=True)
class Answer:
    """An answer of the model.

    Attributes:
        text: The answer.
        probability: Its probability, averaged over the draws.
        second: The next best answer.
        p_value: p-value of Welch's test over the draws that the two differ; None for a model that cannot draw.
        unknown: Words of the question that the model does not know.
        maps: Attention over the regions, averaged over heads: `prior`, `mean`, `std`, each (1, regions).
        image: The picture.
        grid: Rows and columns of the regions, or None.
        boxes: Places of the regions if they are not a grid.
    """

    text: str
    probability: float
    second: str
    p_value: float | None
    unknown: list[str]
    maps: dict[str, Float[Tensor, "1 r"]]
    image: UInt8[Tensor, "height width 3"]
    grid: tuple[int, int] | None
    boxes: Float[Tensor, "r 4"] | None

    def draw(self, path: Path, title: str) -> None:
        """Write the picture with the attention over it."""
        figure = plot_overlay(self.image, self.maps, grid=self.grid, boxes=self.boxes, title=title)
        write_figure(path, figure)


def ask(
    run: Path,
    image: Path,
    question: str,
    *,
    features: Path | None = None,
    data: Path | None = None,
    num_samples: int = 20,
    seed: int = 0,
) -> Answer:
    """Answer a question about a picture with the model of a run.

    Args:
        run: The run folder.
        image: The picture file, or the name of an image of the run's data set.
        question: The question, in the words of the training questions.
        features: A file of `bayesattn features` that holds the picture's features; for runs on files only.
        data: The folder of the data sets, if the picture is one of the run's own.
        num_samples: Draws.
        seed: Seed of the draws.
    """
    config, model = load_run(run)
    if not question.strip():
        raise ValueError("question must have at least one word, got none")
    picture = _picture(config, image, data)
    subject = _regions(config, image, picture, features, data)
    channels = subject[0].shape[-1]
    if channels != model.region_proj.in_features:
        raise ValueError(
            f"the features of {image.name} have {channels} channels, but the run was trained on "
            f"{model.region_proj.in_features}"
        )
    return answer(config, model, question, picture, *subject, num_samples=num_samples, seed=seed)


def answer(
    config: VQAConfig,
    model: MCAN,
    question: str,
    image: UInt8[Tensor, "height width 3"],
    regions: Float[Tensor, "1 r d"],
    mask: Bool[Tensor, "1 r"],
    grid: tuple[int, int] | None,
    boxes: Float[Tensor, "r 4"] | None,
    *,
    num_samples: int = 20,
    seed: int = 0,
) -> Answer:
    """Answer a question about the regions of one picture.

    Args:
        config: Config of the run.
        model: Model of the run, in eval mode.
        question: At least one word.
        image: The picture, kept only for the drawing.
        regions: Its features.
        mask: True where there is a region.
        grid: Rows and columns of the regions, or None.
        boxes: Places of the regions if they are not a grid.
        num_samples: Draws, at least 2.
        seed: Seed of the draws.
    """
    check_count("num_samples", num_samples, least=2)
    words, word_mask = model.vocabulary.encode([question])
    inputs = {"words": words, "word_mask": word_mask, "regions": regions, "region_mask": mask}
    p_value, method = None, usual_method(available_methods(config))
    if method == "mean":
        with torch.no_grad():
            samples = torch.sigmoid(model(**inputs)).unsqueeze(0)
    else:
        has_dropout = method.endswith("dropout")
        samples = predict(model, inputs, num_samples, seed, batch_dims=0, task="multilabel", dropout=has_dropout).samples
        p_value = float(top_two_p_value(samples, test="welch", task="multilabel"))
    mean = samples.mean(dim=0)[0]
    first, second = mean.topk(2).indices.tolist()
    maps = {name: value.mean(dim=1) for name, value in attention_maps(model, inputs, num_samples, seed).items()}
    return Answer(
        text=model.vocabulary.answers[first],
        probability=float(mean[first]),
        second=model.vocabulary.answers[second],
        p_value=p_value,
        unknown=model.vocabulary.unknown(question),
        maps=maps,
        image=image,
        grid=grid,
        boxes=boxes,
    )


def _regions(config: VQAConfig, image: Path, picture: Tensor, features: Path | None, data: Path | None):
    """Return features, mask, grid and boxes of a picture, from its pixels (shapes) or found by its name."""
    if config.data.dataset == "shapes":
        if features is not None:
            raise ValueError("leave out --features: a run on shapes computes them from the pixels")
        values = pixel_features(picture[None])
        return values, torch.ones(values.shape[:2], dtype=torch.bool), GRID, None
    regions, name = _find(config, image, features, data)
    values, mask = regions.gather(torch.tensor([regions.names.index(name)]))
    return values, mask, regions.grid, regions.boxes(regions.names.index(name))


def _picture(config: VQAConfig, image: Path, data: Path | None) -> UInt8[Tensor, "height width 3"]:
    """Return the picture of a file, or if there is none, the one of this name in the run's data set."""
    pictures = None
    if not image.exists() and image == Path(image.name):
        if config.data.dataset == "shapes":
            pictures = load_splits(config.data, None)["test"].pictures
        elif data is not None:
            pictures = find_pictures(config.data.dataset, data / config.data.dataset)
    if pictures is None:
        return read_image(image)
    for name in (image.name, image.stem):
        if name in pictures:
            return pictures.read(name)
    raise ValueError(f"image {image.name!r} is neither a file nor one of the data set's pictures")


def _find(config: VQAConfig, image: Path, features: Path | None, data: Path | None) -> tuple[Regions, str]:
    """Return the features that hold a picture, and its name in them."""
    if features is None and data is None:
        raise ValueError(
            f"{image.name} has no features. Give --features, a file of `bayesattn features`, or --data, the folder with "
            f"{config.data.dataset}/, for a picture of that set"
        )
    if features is not None:
        regions, where = read_regions(features), str(features)
    else:
        assert data is not None
        folder = data / config.data.dataset
        regions, where = FOLDERS[config.data.dataset].read_regions(folder), str(folder)
    name = find_name(image.name, regions.names)
    if name is None:
        raise ValueError(f"{image.name} is not among the {len(regions)} images of {where}")
    return regions, name
