"""Data files that are broken, or of another kind than their name says, are a ValueError; each case was found by fuzzing."""

import json
import lzma

import numpy as np
import pytest
import torch

from bayesattn.files import RunError
from bayesattn_recipes.captioning.data import load_coco
from bayesattn_recipes.common.arrays import check_numbers, read_npz, read_packed_npy
from bayesattn_recipes.graph.data import load_heterophilous
from bayesattn_recipes.language import squad
from bayesattn_recipes.translation.vocabulary import Vocabulary as Pieces
from bayesattn_recipes.vision.features import NpzFolder, load_grid_features
from bayesattn_recipes.vqa import vqa2
from bayesattn_recipes.vqa.vocabulary import Vocabulary as QuestionWords

GRAPH = {
    "node_features": np.ones((6, 3), np.float32),
    "node_labels": np.array([0, 1, 0, 1, 0, 1]),
    "edges": np.array([[0, 1], [2, 3], [4, 5]]),
    "train_masks": np.array([[1, 1, 0, 0, 0, 0]], bool),
    "val_masks": np.array([[0, 0, 1, 1, 0, 0]], bool),
    "test_masks": np.array([[0, 0, 0, 0, 1, 1]], bool),
}


def test_a_whole_graph_is_read(tmp_path):
    np.savez(tmp_path / "actor.npz", **GRAPH)
    assert load_heterophilous(tmp_path, "actor", 0).num_nodes == 6


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("node_features", np.ones((2, 6, 3)), "node_features of .* must hold real numbers in 2 dimensions, got shape"),
        ("node_features", np.full((6, 3), "x"), "must hold real numbers in 2 dimensions, got shape"),
        ("node_features", np.ones((0, 3)), "masks must cover 0 nodes, got shapes"),
        ("node_labels", np.array(3), "node_labels of .* must hold real numbers in 1 dimensions, got shape"),
        ("node_labels", GRAPH["node_labels"] * 2**40, "must be classes from 0 to 5, one for each of 6 nodes"),
        ("edges", np.arange(6), "edges of .* must hold real numbers in 2 dimensions, got shape"),
        ("edges", np.zeros((3, 3), int), "edges must have two ends"),
        ("train_masks", np.array(True), "train_masks of .* must hold real numbers in 2 dimensions, got shape"),
        ("test_masks", np.ones((1, 5), bool), "masks must cover 6 nodes, got shapes"),
    ],
)
def test_a_graph_with_a_wrong_array_is_refused(name, array, message, tmp_path):
    np.savez(tmp_path / "actor.npz", **{**GRAPH, name: array})
    with pytest.raises(ValueError, match=message):
        load_heterophilous(tmp_path, "actor", 0)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"nothing of the kind", b"PK\x05\x06" + bytes(18)])
def test_a_file_that_is_no_archive_is_refused(content, tmp_path):
    (tmp_path / "actor.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"actor\.npz cannot be read"):
        load_heterophilous(tmp_path, "actor", 0)


def test_an_archive_with_a_flipped_bit_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.ones(50))
    content = bytearray(path.read_bytes())
    content[300] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="Bad CRC-32"):
        read_npz(path, ("x",))


def test_a_missing_array_is_named(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones(3))
    with pytest.raises(ValueError, match=r"lacks 'y', 'z'. It must be an npz file with x, y, z"):
        read_npz(tmp_path / "a.npz", ("x", "y", "z"))


def test_an_array_larger_than_any_memory_is_refused(tmp_path):
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999999,), }"
    header += b" " * (117 - len(header)) + b"\n"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(16)
    (tmp_path / "a.npy.xz").write_bytes(lzma.compress(content))
    with pytest.raises(ValueError, match="cannot be read"):
        read_packed_npy(tmp_path / "a.npy.xz")


def test_pickled_arrays_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="cannot be read"):
        read_npz(tmp_path / "a.npz", ("x",))


def test_numbers_of_the_wrong_kind_are_refused():
    with pytest.raises(ValueError, match=r"x must hold real numbers in 1 dimensions, got shape \(3,\) and type complex64"):
        check_numbers(np.ones(3, np.complex64), 1, "x")


@pytest.mark.parametrize("meta", [{"step": np.array(1.0)}, {"step": np.array(["a"] * 3)}, {"names": np.array("a")}])
def test_grid_features_with_a_wrong_table_are_refused(meta, tmp_path):
    stem = tmp_path / "resnet_2x2_pca3"
    np.savez(f"{stem}_meta.npz", **{"names": np.array(["a", "b"]), "step": np.ones(3), **meta})
    np.save(tmp_path / "a.npy", np.ones((3, 2, 4), np.int8))
    (tmp_path / "resnet_2x2_pca3_int8.npy.xz").write_bytes(lzma.compress((tmp_path / "a.npy").read_bytes()))
    with pytest.raises(ValueError, match=rf"{next(iter(meta))} of .* must hold .*, got shape \("):
        load_grid_features(stem)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bbox": np.ones(20)},
        {"bbox": np.ones((5, 3))},
        {"image_w": np.ones(2)},
        {"image_h": np.array(0)},
        {"x": np.array(1)},
    ],
)
def test_detected_regions_with_a_wrong_array_are_refused(wrong, tmp_path):
    arrays = {"x": np.ones((3, 5)), "bbox": np.ones((5, 4)), "image_w": np.array(7), "image_h": np.array(9), **wrong}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=r"a\.npz.* must (hold real numbers|have shape) .*, got (shape )?\("):
        NpzFolder([tmp_path]).boxes(0)


def test_coco_features_without_dimensions_are_refused(tmp_path):
    images = [{"cocoid": 1, "split": "train", "sentences": [{"raw": "a cat"}]}]
    (tmp_path / "dataset_coco.json").write_text(json.dumps({"images": images}))
    (tmp_path / "cocobu_att").mkdir()
    np.savez(tmp_path / "cocobu_att" / "1.npz", feat=np.array(3.0))
    with pytest.raises(ValueError, match=r"feat of .* must hold real numbers in 2 dimensions, got shape \(\)"):
        load_coco(tmp_path)


ENDLESS = {"text": "c", "answer_start": 1e999}


@pytest.mark.parametrize(
    "data",
    [
        True, ["T"], [{}], [{"paragraphs": None}], [{"paragraphs": [None]}], [{"paragraphs": [{}]}],
        [{"paragraphs": [{"context": "c", "qas": [[]]}]}],
        [{"paragraphs": [{"context": ["c"], "qas": [{"id": 1, "question": "q?", "answers": []}]}]}],
        [{"paragraphs": [{"context": "c", "qas": [{"id": 1, "question": ["q?"], "answers": []}]}]}],
        [{"paragraphs": [{"context": "c", "qas": [{"id": 1, "question": "q", "answers": [ENDLESS]}]}]}],
    ],
)  # fmt: skip
def test_squad_of_another_layout_is_refused(data):
    with pytest.raises(ValueError, match=r"SQuAD's layout|is missing or of a wrong kind"):
        squad.parse(json.dumps({"data": data}), "dev.json")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"data": ' * 100_000])
def test_endless_nesting_is_refused(text, tmp_path):
    with pytest.raises(ValueError, match="nested too deeply"):
        squad.parse(text, "dev.json")
    (tmp_path / "v2_OpenEnded_mscoco_train2014_questions.json").write_text(text)
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        vqa2.read_questions(tmp_path)
    (tmp_path / "dataset_coco.json").write_text(text)
    with pytest.raises(ValueError, match="not Karpathy's split"):
        load_coco(tmp_path)


@pytest.mark.parametrize(
    "content", [[3, [], 5], [["a"], [["b"], "c"], 5], [["a"], ["b", "c"], "5"], [["a"], ["b", "c"], 0], {}]
)
def test_words_of_questions_of_another_layout_are_refused(content):
    raw = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
    with pytest.raises(ValueError, match="vocabulary cannot be read"):
        QuestionWords.from_tensor(raw)


@pytest.mark.parametrize(("old", "new"), [('"</s>": 3', '"</s>": 3000'), ('"<s>"', '"<t>"')])
def test_pieces_of_words_with_gaps_in_their_numbers_are_refused(old, new, tmp_path):
    Pieces.learn(["the box is red", "the box is blue"], 40).save(tmp_path)
    text = (tmp_path / "vocabulary.json").read_text()
    assert old in text
    (tmp_path / "vocabulary.json").write_text(text.replace(old, new))
    with pytest.raises(RunError, match="is not a vocabulary"):
        Pieces.load(tmp_path)
