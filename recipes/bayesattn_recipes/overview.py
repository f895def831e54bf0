"""One figure for all applications: the change with Bayesian attention and with its best rival, in points of each measure.

python -m bayesattn_recipes.overview docs/results
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bayesattn_recipes.captioning import page as captioning
from bayesattn_recipes.common import page as pages
from bayesattn_recipes.digits import page as digits
from bayesattn_recipes.graph import page as graph
from bayesattn_recipes.language import page as language
from bayesattn_recipes.translation import page as translation
from bayesattn_recipes.vqa import page as vqa

KINDS = ("BAM-WC", "exact marginal")
# application: its page, and the groups shown
PARTS: dict[str, tuple[Callable[[Path], pages.Page], Callable[[str], bool]]] = {
    "graphs": (graph.read, lambda group: "100 NLL" not in group),
    "language": (language.read, lambda group: "100 NLL" not in group),
    "translation": (translation.read, lambda group: True),
    "captions": (captioning.read, lambda group: group.startswith("Flickr8k")),
    "visual questions": (vqa.read, lambda group: group.startswith("DAQUAR")),
    "from scratch": (digits.read, lambda group: group.endswith(", accuracy")),
}


def read(folder: Path) -> pages.Page:
    """Return the differences of `KINDS` on all applications; Holm's correction stays the one of each page."""
    found = []
    for name, (read_page, is_shown) in PARTS.items():
        for effect in read_page(folder).effects:
            if effect.kind in KINDS and is_shown(effect.group):
                found.append(replace(effect, group=f"{name}: {effect.group}", is_drawn=True))
    return pages.Page(tuple(found), "Difference to soft attention, all applications", "points of accuracy, BLEU, …")


def rebuild(folder: Path) -> Path:
    """Draw the overview figure."""
    path = folder / "overview.png"
    pages.forest(read(folder), path)
    return path


if __name__ == "__main__":
    print(rebuild(Path(sys.argv[1])))
