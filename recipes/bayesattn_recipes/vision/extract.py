"""Features of your own pictures from a pretrained backbone. Needs `timm`, and the weights."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from bayesattn_recipes.common.arrays import check_numbers, read_npz
from bayesattn_recipes.vision.features import grid_in_name, write_regions
from bayesattn_recipes.vision.images import ImageSource

# height and width to which pictures are squashed, and pixels per cell of the last feature map of a ResNet
SIZE = (224, 224)
STRIDE = 32
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def extract_folder(
    folder: Path,
    out: Path,
    *,
    backbone: str = "resnet50",
    weights: Path | None = None,
    project: Path | None = None,
    size: tuple[int, int] | None = None,
    skip_broken: bool = False,
) -> tuple[int, dict[str, str]]:
    """Write the features of all pictures of a folder; return how many, and those left out with the reason.

    Args:
        folder: A folder or an uncompressed tar file.
        out: The file to write.
        backbone: Name of a timm model.
        weights: A safetensors file with its weights; None takes timm's own.
        project: `…_meta.npz` of quantized features: the result is projected to their components, so that runs trained on
            them can be used with these pictures.
        size: Height and width to which every picture is squashed; None takes 32 pixels per cell of the grid that `project`
            names (`…_7x9_…`), and 224 × 224 without one.
        skip_broken: Leave out pictures that cannot be read instead of raising.
    """
    grid_wanted = None if project is None else grid_in_name(project.name)
    if size is None:
        size = SIZE if grid_wanted is None else (STRIDE * grid_wanted[0], STRIDE * grid_wanted[1])
    if min(size) < 1:
        raise ValueError(f"size must be a height and a width of at least 1, got {size}")
    images = ImageSource(folder)
    skipped = images.unreadable(images.names) if skip_broken else {}
    names = [name for name in images.names if name not in skipped]
    if not names:
        raise ValueError(f"none of the {len(images)} images of {folder} can be read")
    components = None if project is None else _read_components(project)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_backbone(backbone, weights).to(device)
    values, grid = [], None
    for name in names:
        cells, grid = grid_features(model, images.read(name), size)
        if grid_wanted not in (None, grid):
            raise ValueError(f"size {size} gives {backbone} a grid of {grid}, but {project} has one of {grid_wanted}")
        if components is not None:
            mean, basis = components
            if basis.shape[1] != cells.shape[1]:
                raise ValueError(f"{backbone} has {cells.shape[1]} channels, but {project} projects {basis.shape[1]}")
            cells = (cells - mean) @ basis.T
        values.append(cells)
    write_regions(out, names, torch.stack(values), grid)
    return len(names), skipped


def load_backbone(name: str, weights: Path | None) -> torch.nn.Module:
    """Return a timm model that gives its last feature map, in eval mode.

    Raises:
        ValueError: timm is not installed, has no such model, or the weights are not available.
    """
    try:
        import timm  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        raise ValueError(
            "computing features needs the package 'timm' and weights of a backbone. Install it with: pip install timm"
        ) from None
    options: dict[str, Any] = {"num_classes": 0, "global_pool": ""}
    if weights is not None and not weights.is_file():
        raise ValueError(f"weights must be a safetensors file, but {weights} is not a file")
    try:
        if weights is None:
            model = timm.create_model(name, pretrained=True, **options)
        else:
            model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay={"file": str(weights)}, **options)
    # timm passes on whatever its downloader or the checkpoint reader raises
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"backbone {name!r} cannot be loaded with its weights: {reason}. Give --weights FILE") from None
    return model.eval()


@torch.no_grad()
def grid_features(
    model: torch.nn.Module, image: UInt8[Tensor, "height width 3"], size: tuple[int, int] = SIZE
) -> tuple[Float[Tensor, "r d"], tuple[int, int]]:
    """Return the cells of the last feature map of a picture squashed to this size, row by row, and their grid."""
    device = next((parameter.device for parameter in model.parameters()), image.device)
    pixels = image.permute(2, 0, 1)[None].float() / 255.0
    pixels = torch.nn.functional.interpolate(pixels, size, mode="bilinear", antialias=True)
    pixels = (pixels - torch.tensor(_MEAN)[:, None, None]) / torch.tensor(_DEVIATION)[:, None, None]
    found = model(pixels.to(device)).cpu()
    if found.ndim != 4:
        raise ValueError(
            f"the backbone must return a feature map (1, channels, rows, columns), got shape {tuple(found.shape)}"
        )
    return found[0].flatten(1).T, (found.shape[2], found.shape[3])


def _read_components(path: Path) -> tuple[Float[Tensor, " c"], Float[Tensor, "d c"]]:
    found = read_npz(path, ("mean", "components"))
    mean, components = (
        check_numbers(found[name], ndim, f"{name} of {path}") for name, ndim in (("mean", 1), ("components", 2))
    )
    return torch.from_numpy(mean.astype(np.float32)), torch.from_numpy(components.astype(np.float32))
