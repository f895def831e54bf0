"""Images with several captions each: three data sets behind one interface.

    shapes     colored shapes, generated; needs no file
    flickr8k   8,000 photos, five captions each, the standard split, grid features     DIR/flickr8k
    coco       Karpathy's split of COCO with bottom-up features, for those who have it  DIR/coco

Captions and features come from different files; they are paired by the name of the image, and a name without a partner is
an error.
"""

import json
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from bayesattn_recipes.common.arrays import check_numbers, read_npz
from bayesattn_recipes.common.sources import explained
from bayesattn_recipes.vision.features import NpzFolder, Regions, load_grid_features
from bayesattn_recipes.vision.ids import positions
from bayesattn_recipes.vision.images import ImageSource, Pictures
from bayesattn_recipes.vision.shapes import make_shapes_world

DatasetName = Literal["shapes", "flickr8k", "coco"]
SPLITS = ("train", "validation", "test")
# images of each split of the generated world, and the seed it grows from: the same for every run
SHAPES_SIZES = (800, 100, 200)
SHAPES_SEED = 2020


@dataclass(frozen=True)
class CaptionSplit:
    """Images of one split, each with its captions.

    Attributes:
        names: Names of the images.
        captions: The sentences about each, as written.
        rows: Position of each image in the data set's regions.
    """

    names: list[str]
    captions: list[list[str]]
    rows: Int[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class CaptionData:
    """A data set.

    Attributes:
        splits: `train`, `validation` and `test`.
        regions: Features of the regions of all images.
        images: The pictures, by name, if available; None if there are only features.
    """

    splits: dict[str, CaptionSplit]
    regions: Regions
    images: Pictures | None = None

    def picture(self, name: str) -> UInt8[Tensor, "height width 3"]:
        """Return the picture of this name."""
        if self.images is None:
            raise ValueError(f"image {name!r} is neither a file nor one of the data set's 0 pictures")
        return self.images.read(name)


def load_data(name: DatasetName, data: Path | None = None) -> CaptionData:
    """Load a data set.

    Args:
        name: Name of the data set.
        data: The folder of all data sets; the generated one needs none.
    """
    if name == "shapes":
        return generate_shapes()
    with explained(name, data):
        if data is None:
            raise ValueError(f"{name} needs data, the folder that holds the folder {name!r}. Give it with --data DIR")
        return {"flickr8k": load_flickr8k, "coco": load_coco}[name](data / name)


def generate_shapes(sizes: Sequence[int] = SHAPES_SIZES, seed: int = SHAPES_SEED) -> CaptionData:
    """Generate the shapes world; its images are cut into train, validation and test in this order."""
    world = make_shapes_world(sum(sizes), seed=seed)
    rows = torch.arange(sum(sizes)).split(list(sizes))
    splits = {
        split: CaptionSplit([world.names[i] for i in part], [list(world.captions[i]) for i in part], part)
        for split, part in zip(SPLITS, rows)
    }
    return CaptionData(splits, world.regions, Pictures(dict(zip(world.names, world.images))))


def load_flickr8k(folder: Path) -> CaptionData:
    """Read Flickr8k: the token file (plain or xz), the three split lists, grid features and, if there, the pictures."""
    captions = read_token_file(_one_of(folder, ("Flickr8k.token.txt", "Flickr8k.token.txt.xz")))
    files = {split: folder / f"Flickr_8k.{word}Images.txt" for split, word in zip(SPLITS, ("train", "dev", "test"))}
    names = {split: _lines(path) for split, path in files.items()}
    stems = sorted(path.name.removesuffix("_meta.npz") for path in folder.glob("*_meta.npz"))
    if len(stems) != 1:
        raise ValueError(f"{folder} must hold one set of features (*_meta.npz), got {len(stems)}")
    tars = sorted(folder.glob("images*.tar"))
    images = tars[0] if tars else folder / "images"
    return pair(names, captions, load_grid_features(folder / stems[0]), images)


def load_coco(folder: Path) -> CaptionData:
    """Read `dataset_coco.json` (Karpathy; `restval` is training), `cocobu_att/IMAGE_ID.npz` and, if there, `images/`."""
    path = folder / "dataset_coco.json"
    places = {"train": "train", "restval": "train", "val": "validation", "test": "test"}
    names: dict[str, list[str]] = {split: [] for split in SPLITS}
    captions: dict[str, list[str]] = {}
    try:
        for image in json.loads(_text(path))["images"]:
            name = str(image["cocoid"])
            names[places[image["split"]]].append(name)
            captions.setdefault(name, []).extend(str(sentence["raw"]) for sentence in image["sentences"])
    except (KeyError, TypeError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not Karpathy's split of COCO: {type(error).__name__}: {error}") from None
    return pair(names, captions, BottomUpFolder(folder / "cocobu_att"), folder / "images")


def pair(
    names: dict[str, list[str]],
    captions: dict[str, list[str]],
    regions: Regions,
    images: Path,
) -> CaptionData:
    """Match captions and features by the names of their images; `images` is where the pictures are, if there are any.

    Raises:
        ValueError: An image has no captions or no features, or is in two splits.
    """
    everywhere = [name for split in SPLITS for name in names[split]]
    if len(set(everywhere)) != len(everywhere):
        twice = next(name for place, name in enumerate(everywhere) if name in everywhere[:place])
        raise ValueError(f"image {twice!r} is listed twice. Each image must be listed once, in one split")
    splits = {}
    for split in SPLITS:
        if not names[split]:
            raise ValueError(f"the {split} split must list at least one image, got none")
        silent = [name for name in names[split] if not captions.get(name)]
        if silent:
            raise ValueError(f"{len(silent)} images of the {split} split have no caption. The first is {silent[0]!r}")
        rows = positions(names[split], regions.names, what=f"captions of the {split} split", where="features")
        splits[split] = CaptionSplit(names[split], [captions[name] for name in names[split]], rows)
    return CaptionData(splits, regions, Pictures(ImageSource(images)) if images.exists() else None)


def read_token_file(path: Path) -> dict[str, list[str]]:
    """Read lines `NAME#NUMBER<tab>sentence` into the sentences of each image, in the order of their numbers."""
    numbered: dict[str, dict[int, str]] = {}
    for count, line in enumerate(_lines(path), start=1):
        place, tab, sentence = line.partition("\t")
        name, mark, number = place.rpartition("#")
        if not (tab and mark and name and number.isdigit()):
            raise ValueError(f"{path} line {count} must be NAME#NUMBER, a tab and a sentence, got {line[:60]!r}")
        if int(number) in numbered.setdefault(name, {}):
            raise ValueError(f"{path} line {count}: caption {number} of {name!r} occurs twice. Each caption must occur once")
        numbered[name][int(number)] = sentence
    return {name: [sentences[number] for number in sorted(sentences)] for name, sentences in numbered.items()}


class BottomUpFolder(NpzFolder):
    """Bottom-up features as self-critical.pytorch keeps them: `IMAGE_ID.npz` with `feat` (regions, channels).

    Args:
        folder: Folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__([folder])

    def _read(self, index: int) -> dict[str, Any]:
        path = self._files[self.names[index]]
        return {"x": check_numbers(read_npz(path, ("feat",))["feat"], 2, f"feat of {path}").T}


def _one_of(folder: Path, names: Sequence[str]) -> Path:
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        raise ValueError(f"{folder} holds neither {' nor '.join(names)}")
    return found[0]


def _lines(path: Path) -> list[str]:
    return [line for line in _text(path).splitlines() if line.strip()]


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return (lzma.decompress(content) if path.suffix == ".xz" else content).decode()
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
