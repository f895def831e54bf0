"""A world of colored shapes: pictures, grid features from their pixels, questions with disagreeing annotators, captions.

It needs no file, trains in seconds, and its uncertainty is known: some shapes have a hue halfway between two color names,
and the annotators disagree about them exactly as often as the hue says. Scenes are drawn from a seed; different seeds give
different worlds, so splits are worlds of their own.
"""

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from bayesattn.scalars import check_count
from bayesattn_recipes.vision.annotations import Question
from bayesattn_recipes.vision.features import StoredRegions

GRID = (4, 4)
CELL = 16
SIDE = GRID[0] * CELL
# blocks of pixels along a side of a cell; each is averaged into one feature
BLOCKS = 4
# gray of the empty ground
GROUND = 40.0

KINDS = ("circle", "square", "triangle")
HUES = {"red": 0.0, "yellow": 60.0, "green": 120.0, "blue": 240.0}
COLORS = tuple(HUES)
MAX_SHAPES = 4
# about each picture, and answers to each question
QUESTIONS_PER_IMAGE, NUM_ANNOTATORS, CAPTIONS_PER_IMAGE = 4, 10, 5
NUMBER_WORDS = ("no", "one", "two", "three", "four")

# degrees within which annotators agree on a color, and their error rate otherwise
HUE_TOLERANCE = 15.0
AMBIGUOUS_SHARE = 0.2
SHAPE_SLIP, ANSWER_SLIP, COUNT_SLIP = 0.04, 0.06, 0.03


@dataclass(frozen=True)
class Shape:
    """One shape: what it is, its hue in degrees, and the cell it lies in."""

    kind: str
    hue: float
    row: int
    column: int

    @property
    def color(self) -> str:
        """The color most annotators name."""
        return COLORS[int(np.argmax(color_shares(self.hue)))]


@dataclass(frozen=True)
class ShapesWorld:
    """Images with everything the two recipes need.

    Attributes:
        names: Names of the images, `shapes-SEED-0000` and so on.
        images: The pictures.
        regions: Features of the 4 × 4 cells, computed from the pixels.
        scenes: The shapes in each picture.
        questions: A few about every picture, in its order.
        captions: Five for every picture.
    """

    names: list[str]
    images: UInt8[Tensor, "n side side 3"]
    regions: StoredRegions
    scenes: list[tuple[Shape, ...]]
    questions: list[Question]
    captions: list[tuple[str, ...]]


def make_shapes_world(num_images: int, seed: int) -> ShapesWorld:
    """Draw a world of pictures, questions and captions.

    Args:
        num_images: Pictures.
        seed: Seed of everything.
    """
    check_count("num_images", num_images)
    rng = np.random.default_rng(seed)
    names = [f"shapes-{seed}-{index:04d}" for index in range(num_images)]
    scenes = [_draw_scene(rng) for _ in names]
    images = torch.from_numpy(np.stack([_paint(scene, rng) for scene in scenes]))
    questions = [_ask(name, scene, rng) for name, scene in zip(names, scenes) for _ in range(QUESTIONS_PER_IMAGE)]
    captions = [tuple(_describe(scene, rng) for _ in range(CAPTIONS_PER_IMAGE)) for scene in scenes]
    regions = StoredRegions(names, pixel_features(images), grid=GRID)
    return ShapesWorld(names, images, regions, scenes, questions, captions)


def pixel_features(images: UInt8[Tensor, "n height width 3"]) -> Float[Tensor, "n r d"]:
    """Return the features of the 4 × 4 cells: mean colors of 4 × 4 blocks, and the place of the cell.

    Pictures of another size are scaled first, so that any picture can be used.
    """
    pixels = images.permute(0, 3, 1, 2).float() / 255.0
    blocks = torch.nn.functional.adaptive_avg_pool2d(pixels, (GRID[0] * BLOCKS, GRID[1] * BLOCKS))
    cells = blocks.unfold(2, BLOCKS, BLOCKS).unfold(3, BLOCKS, BLOCKS)
    colors = cells.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    row, column = torch.meshgrid(torch.linspace(-1.0, 1.0, GRID[0]), torch.linspace(-1.0, 1.0, GRID[1]), indexing="ij")
    place = torch.stack([row.flatten(), column.flatten()], dim=1).expand(len(images), -1, -1)
    # relative to the empty ground, with fixed numbers: every split and every user's picture is treated alike
    return torch.cat([(colors - GROUND / 255.0) / 0.3, place], dim=2)


@lru_cache(maxsize=4096)
def color_shares(hue: float) -> np.ndarray:
    """Return the share of annotators who name each of `COLORS` for a hue in degrees."""
    distance = np.array([abs((hue - anchor + 180.0) % 360.0 - 180.0) for anchor in HUES.values()])
    closeness = -0.5 * (distance / HUE_TOLERANCE) ** 2
    share = np.exp(closeness - closeness.max())
    return share / share.sum()


def _draw_scene(rng: np.random.Generator) -> tuple[Shape, ...]:
    count = int(rng.integers(1, MAX_SHAPES + 1))
    cells = rng.choice(GRID[0] * GRID[1], size=count, replace=False)
    return tuple(Shape(str(rng.choice(KINDS)), _draw_hue(rng), int(cell) // GRID[1], int(cell) % GRID[1]) for cell in cells)


def _draw_hue(rng: np.random.Generator) -> float:
    anchors = [*HUES.values(), 360.0]
    place = int(rng.integers(len(COLORS)))
    hue = anchors[place]
    if rng.random() < AMBIGUOUS_SHARE:
        hue = (anchors[place] + anchors[place + 1]) / 2.0
    return float((hue + rng.normal(0.0, 4.0)) % 360.0)


def _paint(scene: Sequence[Shape], rng: np.random.Generator) -> np.ndarray:
    """Paint shapes of varying size and place within their cells on a noisy dark ground."""
    canvas = np.full((SIDE, SIDE, 3), GROUND)
    y, x = np.mgrid[0:SIDE, 0:SIDE] + 0.5
    for shape in scene:
        radius = rng.uniform(6.0, 7.5)
        slack = CELL / 2 - radius
        middle_y = (shape.row + 0.5) * CELL + rng.uniform(-slack, slack)
        middle_x = (shape.column + 0.5) * CELL + rng.uniform(-slack, slack)
        dy, dx = (y - middle_y) / radius, (x - middle_x) / radius
        inside = {
            "circle": dy**2 + dx**2 <= 1.0,
            "square": np.maximum(abs(dy), abs(dx)) <= 0.9,
            "triangle": (dy <= 0.9) & (dy >= 2.0 * abs(dx) - 1.0),
        }[shape.kind]
        rgb = np.array(colorsys.hsv_to_rgb(shape.hue / 360.0, 0.9, 0.95)) * 255.0
        canvas[inside] = rgb * rng.uniform(0.8, 1.0)
    return np.clip(canvas + rng.normal(0.0, 8.0, canvas.shape), 0.0, 255.0).astype(np.uint8)


def _ask(name: str, scene: Sequence[Shape], rng: np.random.Generator) -> Question:
    """Return one question that has an answer, with the answers of all annotators."""
    once = [shape for shape in scene if sum(other.kind == shape.kind for other in scene) == 1]
    alone = [shape for shape in scene if sum(other.color == shape.color for other in scene) == 1]
    kinds = ["number", "yes/no", *(["color"] if once else []), *(["shape"] if alone else [])]
    kind = str(rng.choice(kinds))
    if kind == "color":
        shape = once[int(rng.integers(len(once)))]
        text, options, shares = f"what color is the {shape.kind}?", COLORS, color_shares(shape.hue)
    elif kind == "shape":
        shape = alone[int(rng.integers(len(alone)))]
        text, options = f"what shape is {shape.color}?", KINDS
        shares = _slip(KINDS.index(shape.kind), len(KINDS), SHAPE_SLIP)
    elif kind == "number":
        what = str(rng.choice([*KINDS, "shape"]))
        count = sum(what in ("shape", shape.kind) for shape in scene)
        text, options = f"how many {what}s are there?", tuple(map(str, range(MAX_SHAPES + 2)))
        shares = np.zeros(len(options))
        # annotators miscount by one, more often the more there is to count, but never count a shape if there is none
        shares[[count, count + 1, max(count - 1, 0)]] = COUNT_SLIP * count / 2
        shares[count] = 1.0 - COUNT_SLIP * count
    else:
        text, is_so = _claim(scene, rng)
        options, shares = ("yes", "no"), _slip(0 if is_so else 1, 2, ANSWER_SLIP)
    answers = tuple(options[index] for index in rng.choice(len(options), size=NUM_ANNOTATORS, p=shares))
    return Question(name, text, answers, kind)


def _claim(scene: Sequence[Shape], rng: np.random.Generator) -> tuple[str, bool]:
    """Return a question about what there is or where, true half of the time, and whether it is true."""
    wanted = bool(rng.random() < 0.5)
    if len(scene) > 1 and rng.random() < 0.5:
        first, second = (scene[int(index)] for index in rng.choice(len(scene), size=2, replace=False))
        if first.column != second.column and (first.kind, first.color) != (second.kind, second.color):
            if (first.column < second.column) != wanted:
                first, second = second, first
            # a second shape like either would make the question ambiguous
            twins = [s for s in scene if (s.kind, s.color) in ((first.kind, first.color), (second.kind, second.color))]
            if len(twins) == 2:
                return f"is the {first.color} {first.kind} left of the {second.color} {second.kind}?", wanted
    there = {(shape.color, shape.kind) for shape in scene}
    every = [(color, kind) for color in COLORS for kind in KINDS]
    options = sorted(there) if wanted else [pair for pair in every if pair not in there]
    color, kind = options[int(rng.integers(len(options)))]
    return f"is there a {color} {kind}?", wanted


def _slip(right: int, count: int, rate: float) -> np.ndarray:
    shares = np.full(count, rate / (count - 1))
    shares[right] = 1.0 - rate
    return shares


def _describe(scene: Sequence[Shape], rng: np.random.Generator) -> str:
    """Return one caption: people describe different things and name ambiguous colors differently."""
    words = [f"{rng.choice(COLORS, p=color_shares(shape.hue))} {shape.kind}" for shape in scene]
    style = int(rng.integers(4))
    if style == 0 and len(scene) > 1:
        first, second = (int(index) for index in rng.choice(len(scene), size=2, replace=False))
        return f"a {words[first]} {_relation(scene[first], scene[second])} a {words[second]}"
    if style == 1 and len(scene) > 1:
        return f"{NUMBER_WORDS[len(scene)]} shapes and one of them is a {words[int(rng.integers(len(scene)))]}"
    if style == 2:
        chosen = int(rng.integers(len(scene)))
        shape = scene[chosen]
        height = "top" if shape.row < GRID[0] // 2 else "bottom"
        return f"a {words[chosen]} at the {height} {'left' if shape.column < GRID[1] // 2 else 'right'}"
    listed = [f"a {word}" for word in words]
    return " and ".join([" , ".join(listed[:-1]), listed[-1]]) if len(listed) > 1 else f"there is {listed[0]}"


def _relation(first: Shape, second: Shape) -> str:
    down, right = first.row - second.row, first.column - second.column
    if abs(right) >= abs(down):
        return "left of" if right < 0 else "right of"
    return "above" if down < 0 else "below"
