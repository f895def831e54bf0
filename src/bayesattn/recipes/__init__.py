"""Complete applications: data, model, training, evaluation. Each is a folder of its own; `bayesattn list` shows them.

A recipe is found by its name here and imported only when it is used, because each needs packages of its own.
"""

import importlib
from pathlib import Path
from typing import Any

# name: one line for `bayesattn list`
RECIPES = {
    "digits": "8 x 8 handwritten digits (in scikit-learn), 200 labels, shifted and scrambled test images",
    "graph": "node classification with a graph attention network: Cora, Citeseer, PubMed, heterophilous, generated",
    "language": "pretrained encoders fine-tuned on GLUE, SQuAD or texts of your own",
    "translation": "German to English with LSTMs: Multi30k, Tatoeba, IWSLT14; Bayesian, hard, variational attention",
    "captioning": "image captions with Att2in: generated shapes, Flickr8k, COCO",
    "vqa": "visual question answering with MCAN: VQA-v2, DAQUAR, a generated world of shapes",
}

# the recipes that read no files at all, or not for one of their data sets: the setting that names it, and its name
WITHOUT_FILES = {
    "digits": None,
    "graph": ("dataset", "generated"),
    "captioning": ("dataset", "shapes"),
    "vqa": ("data.dataset", "shapes"),
}


def config_folder(recipe: str) -> Path:
    """Return the folder of a recipe's configs."""
    check_name(recipe)
    return Path(__file__).parent / recipe / "configs"


def load(recipe: str, part: str) -> Any:
    """Import `part` (`train`, `evaluate`, …) of a recipe."""
    check_name(recipe)
    try:
        return importlib.import_module(f"bayesattn.recipes.{recipe}.{part}")
    except ModuleNotFoundError as error:
        if error.name == f"bayesattn.recipes.{recipe}.{part}":
            raise ValueError(f"recipe {recipe!r} has no {part!r}") from None
        if error.name and error.name.startswith("bayesattn"):
            raise
        raise ValueError(
            f"recipe {recipe!r} needs the package {error.name!r}; install it with: pip install 'bayesattn[recipes]'"
        ) from None


def reads_files(recipe: str, config: dict[str, Any]) -> bool:
    """Whether a run of a recipe with this config looks for files in the folder of the data sets."""
    if recipe not in WITHOUT_FILES:
        return True
    place = WITHOUT_FILES[recipe]
    if place is None:
        return False
    names, generated = place
    value: Any = config
    for name in names.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value != generated


def check_name(recipe: str) -> None:
    """Raise unless there is such a recipe."""
    if recipe not in RECIPES:
        raise ValueError(f"recipe is {recipe!r}; allowed: {', '.join(map(repr, RECIPES))}")
