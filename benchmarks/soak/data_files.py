"""Small whole files of every data format that a recipe reads, and ways to break them; `fuzz.py` feeds them to loaders."""

import gzip
import io
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bayesattn_recipes.captioning import data as captioning
from bayesattn_recipes.captioning.vocabulary import Vocabulary as CaptionWords
from bayesattn_recipes.graph.data import load_heterophilous
from bayesattn_recipes.graph.pickles import read_pickle
from bayesattn_recipes.language import squad
from bayesattn_recipes.language.data import load_own, read_examples
from bayesattn_recipes.language.tasks import TASKS
from bayesattn_recipes.translation.text import read_pairs, read_tab_separated
from bayesattn_recipes.translation.vocabulary import Vocabulary as Pieces
from bayesattn_recipes.vision.features import NpzFolder, load_grid_features, read_regions, write_regions
from bayesattn_recipes.vision.images import ImageSource, decode_image
from bayesattn_recipes.vqa import daquar, vqa2
from bayesattn_recipes.vqa.vocabulary import Vocabulary as QuestionWords

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**70, 0.5, float("nan"), float("inf"), "", "1", "x" * 300, "\ud800", [], [1, [2]], {}, {"a": 1},
    [None], [[]],
)  # fmt: skip
OWN = "sentence\tlabel\n" + "".join(f"text number {i} is here\t{'ab'[i % 2]}\n" for i in range(60))
STSB = "sentence1\tsentence2\tscore\nA man.\tA dog.\t3.5\nA cat.\tA cat.\t5\n"
ANSWER = {"id": "q", "question": "What color?", "answers": [{"text": "red", "answer_start": 10}], "is_impossible": False}
SQUAD = {"data": [{"title": "T", "paragraphs": [{"context": "The box is red.", "qas": [ANSWER]}]}]}
SQUAD["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] = 11
# a dictionary of lists, as Planetoid's graphs are, and an array
GRAPH = b"\x80\x02}q\x00(K\x00]q\x01(K\x01K\x02eK\x01]q\x02K\x00au."
ARRAY = (
    b"\x80\x02cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87Rq\x03(K\x01K\x02K\x03\x86"
    b"cnumpy\ndtype\nq\x04U\x02i4K\x00K\x01\x87R(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x18"
    + np.arange(6, dtype="<i4").tobytes()
    + b"tb."
)
QUESTIONS = {"questions": [{"question_id": 1, "image_id": 9, "question": "What is it?"}]}
ANNOTATIONS = {
    "annotations": [{"question_id": 1, "image_id": 9, "answers": [{"answer": "a cat"}] * 3, "answer_type": "other"}]
}
COCO = {
    "images": [
        {"cocoid": number, "split": split, "sentences": [{"raw": "a cat sits"}]}
        for number, split in enumerate(("train", "restval", "val", "test"))
    ]
}
QUESTION_WORDS = QuestionWords.build(["what is it", "is it red"], ["yes", "no"], word_min_count=1, answer_min_count=1)
CAPTION_WORDS = CaptionWords.build(["a cat sits", "a dog"], 1)
TOKENS = "".join(f"image{i}.jpg#{n}\ta dog runs\n" for i in range(2) for n in range(3))
ARRAYS = {
    "node_features": np.ones((6, 3), np.float32),
    "node_labels": np.array([0, 1, 0, 1, 0, 1]),
    "edges": np.array([[0, 1], [2, 3], [4, 5]]),
    "train_masks": np.array([[1, 1, 0, 0, 0, 0]], bool),
    "val_masks": np.array([[0, 0, 1, 1, 0, 0]], bool),
    "test_masks": np.array([[0, 0, 0, 0, 1, 1]], bool),
}


def change_values(value: Any, draw: random.Random) -> Any:
    """Return a tree of JSON values with one of them replaced, removed or wrapped."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(sorted(value))
        if draw.random() < 0.1:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: change_values(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return [*value[:at], change_values(value[at], draw), *value[at + 1 :]]
    return draw.choice((*VALUES, [value], {"a": value}))


def change_arrays(arrays: dict[str, np.ndarray], draw: random.Random) -> dict[str, np.ndarray]:
    """Return arrays with one of them missing, or of another shape, type or content."""
    name = draw.choice(sorted(arrays))
    array = np.atleast_1d(arrays[name])
    others = (
        array[:0], array[None], array.reshape(-1), array[..., :1], array.astype(np.float16), array.astype("U3"), np.array(3),
        np.full(array.shape, np.nan), array.astype(np.complex64),
    )  # fmt: skip
    if array.dtype.kind in "biuf":
        others += (array.astype(np.int64) - 1, array.astype(np.int64) * 2**40)
    changed = {**arrays, name: draw.choice(others)}
    return changed if draw.random() < 0.9 else {key: value for key, value in changed.items() if key != name}


class DataTargets:
    """A function for each format that writes one broken file and reads it.

    Args:
        folder: Folder for the files.
        draw: Chooses what to break.
        mutate: Breaks bytes.
    """

    def __init__(self, folder: Path, draw: random.Random, mutate: Callable[[bytes, random.Random], bytes]) -> None:
        self.folder, self.draw, self.mutate = folder, draw, mutate
        image = io.BytesIO()
        Image.new("RGB", (5, 4), "red").save(image, "PNG")
        self.image = image.getvalue()
        jpeg = io.BytesIO()
        Image.new("RGB", (9, 7), "red").save(jpeg, "JPEG")
        self.jpeg = jpeg.getvalue()
        Pieces.learn(["the box is red", "the box is blue"], 40, lowercase=False).save(folder)
        self.pieces = (folder / "vocabulary.json").read_bytes()
        write_regions(folder / "r.safetensors", ["a", "b"], torch.ones(2, 4, 3), (2, 2))
        self.regions = (folder / "r.safetensors").read_bytes()
        self.tar = self._tar()
        self.all: dict[str, Callable[[], object]] = {
            "own texts": lambda: load_own(self.write(folder / "own" / "train.tsv", OWN.encode()).parent),
            "STS-B": lambda: read_examples(TASKS["stsb"], self.text(STSB), "a file"),
            "SQuAD": lambda: squad.parse(self.json(SQUAD), "a file"),
            "Planetoid's pickles": lambda: read_pickle(self.write(folder / "p", draw.choice((GRAPH, ARRAY)))),
            "heterophilous graphs": self.graph,
            "pairs of sentences": self.pairs,
            "Tatoeba": lambda: read_tab_separated(
                self.write(folder / "t.txt", b"A box.\tEine Kiste.\tx\nA dog.\tEin Hund.\n")
            ),
            "pieces of words": lambda: Pieces.load(self.write(folder / "vocabulary.json", self.pieces).parent).pieces,
            "words of captions": lambda: CaptionWords.from_tensor(self.vocabulary(CAPTION_WORDS.to_tensor())),
            "words of questions": lambda: QuestionWords.from_tensor(self.vocabulary(QUESTION_WORDS.to_tensor())),
            "DAQUAR": self.daquar,
            "VQA-v2": self.vqa2,
            "Flickr8k's tokens": lambda: captioning.read_token_file(self.write(folder / "tokens.txt", TOKENS.encode())),
            "COCO": self.coco,
            "own features": lambda: read_regions(self.write(folder / "r.safetensors", self.regions)),
            "grid features": self.grid,
            "bottom-up features": self.bottom_up,
            "pictures": lambda: decode_image(self.broken(draw.choice((self.image, self.jpeg))), "a picture"),
            "archives of pictures": self.archive,
        }

    def broken(self, content: bytes) -> bytes:
        """Return bytes, broken three times out of four."""
        return self.mutate(content, self.draw) if self.draw.random() < 0.75 else content

    def write(self, path: Path, content: bytes) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.broken(content))
        return path

    def text(self, text: str) -> str:
        return self.broken(text.encode()).decode("utf-8", "replace")

    def json(self, value: Any) -> str:
        """Return JSON with a wrong value in it, or broken as text."""
        if self.draw.random() < 0.7:
            return json.dumps(change_values(value, self.draw))
        return self.text(json.dumps(value))

    def vocabulary(self, content: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a vocabulary in a checkpoint, broken; those of questions are JSON."""
        text = bytes(content.tolist())
        is_json = text[:1] == b"["
        found = self.json(json.loads(text)).encode("utf-8", "replace") if is_json else self.broken(text)
        return torch.frombuffer(bytearray(found or b" "), dtype=torch.uint8)

    def npz(self, path: Path, arrays: dict[str, np.ndarray]) -> Path:
        """Write an npz file with a wrong array in it, or broken as bytes."""
        content, is_wrong = io.BytesIO(), self.draw.random() < 0.6
        np.savez(content, **(change_arrays(arrays, self.draw) if is_wrong else arrays))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.getvalue() if is_wrong else self.broken(content.getvalue()))
        return path

    def graph(self) -> object:
        self.npz(self.folder / "actor.npz", ARRAYS)
        return load_heterophilous(self.folder, "actor", 0)

    def pairs(self) -> object:
        pack, suffix = self.draw.choice(((lambda x: x, ""), (gzip.compress, ".gz"), (lzma.compress, ".xz")))
        source = self.write(self.folder / f"a.de{suffix}", pack(b"Eine Kiste.\nEin Hund.\n"))
        (self.folder / "a.en").write_bytes(b"A box.\nA dog.\n")
        return read_pairs(source, self.folder / "a.en")

    def daquar(self) -> object:
        place = self.folder / "daquar"
        files = {
            "all_qa_pairs.txt": b"what is red in the image1 ?\nbox\nhow many chairs are in image2 ?\n2\n",
            "train_images_list.txt": b"image1\n",
            "test_images_list.txt": b"image2\n",
        }
        chosen = self.draw.choice(sorted(files))
        place.mkdir(exist_ok=True)
        for name, content in files.items():
            (place / name).write_bytes(self.broken(content) if name == chosen else content)
        return daquar.read_questions(place)

    def vqa2(self) -> object:
        place = self.folder / "vqa2"
        place.mkdir(exist_ok=True)
        files = {f"v2_OpenEnded_mscoco_{coco}_questions.json": QUESTIONS for coco in vqa2.SPLITS.values()}
        files |= {f"v2_mscoco_{coco}_annotations.json": ANNOTATIONS for coco in vqa2.SPLITS.values()}
        chosen = self.draw.choice(sorted(files))
        for name, value in files.items():
            (place / name).write_text(self.json(value) if name == chosen else json.dumps(value), errors="replace")
        return vqa2.read_questions(place)

    def coco(self) -> object:
        place = self.folder / "coco"
        place.mkdir(exist_ok=True)
        chosen, arrays = self.draw.randrange(8), {"feat": np.ones((5, 3), np.float32)}
        (place / "dataset_coco.json").write_text(self.json(COCO) if chosen > 3 else json.dumps(COCO), errors="replace")
        (place / "cocobu_att").mkdir(exist_ok=True)
        for number in range(4):
            path = place / "cocobu_att" / f"{number}.npz"
            np.savez(path, **arrays) if number != chosen else self.npz(path, arrays)
        found = captioning.load_coco(place)
        return found.regions.gather(torch.arange(2))

    def grid(self) -> object:
        stem = self.folder / "resnet_2x2_pca3"
        arrays, meta = {"names": np.array(["a", "b"]), "step": np.ones(3, np.float32)}, Path(f"{stem}_meta.npz")
        is_meta, content = self.draw.random() < 0.5, io.BytesIO()
        self.npz(meta, arrays) if is_meta else np.savez(meta, **arrays)
        shape = (3, 2, 4) if is_meta else self.draw.choice(((3, 2, 4), (3, 2, 4), (3, 2), (2, 3, 4), (3, 2, 0)))
        np.save(content, np.ones(shape, np.int8 if is_meta else self.draw.choice((np.int8, np.int8, np.float32))))
        packed = lzma.compress(content.getvalue())
        Path(f"{stem}_int8.npy.xz").write_bytes(packed if is_meta else self.broken(packed))
        return load_grid_features(stem).gather(torch.arange(2))

    def bottom_up(self) -> object:
        arrays = {"x": np.ones((3, 5), np.float32), "bbox": np.ones((5, 4)), "image_w": np.array(7), "image_h": np.array(9)}
        place = self.folder / "features"
        for name in ("a", "b"):
            self.npz(place / f"{name}.npz", arrays)
        regions = NpzFolder([place])
        return regions.boxes(0), regions.gather(torch.arange(2))

    def archive(self) -> object:
        source = ImageSource(self.write(self.folder / "images.tar", self.tar))
        return [source.read(name) for name in source.names]

    def _tar(self) -> bytes:
        import tarfile

        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as archive:
            for name in ("a.png", "b.png"):
                member = tarfile.TarInfo(name)
                member.size = len(self.image)
                archive.addfile(member, io.BytesIO(self.image))
        return content.getvalue()
