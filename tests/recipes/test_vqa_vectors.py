"""Pretrained word vectors: each goes to its own word, and a file that is not in GloVe's format is named."""

import re

import pytest
import torch

from bayesattn_recipes.vqa.train import VQAExperiment, load_config
from bayesattn_recipes.vqa.vectors import load_vectors, read_vectors

TINY = [
    *("data.train_images=30", "model.width=8", "model.num_heads=2", "model.feedforward_dim=8", "model.word_dim=3"),
    *("model.reduction_dim=5", "model.fused_dim=6", "data.word_vectors=vectors.txt"),
]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_text(". . . 9 9 9\ncircle 0.5 -1e-2 3\nzebra 1 2 3\nhow 4 5 6\n", encoding="utf-8")
    return path


def test_vectors_go_to_their_words_and_others_stay(path):
    embedding = torch.full((5, 3), 7.0)
    assert load_vectors(embedding, path, {"what": 2, "circle": 3, "how": 4}) == 2
    assert embedding.tolist() == [[7.0] * 3, [7.0] * 3, [7.0] * 3, [0.5, pytest.approx(-0.01), 3.0], [4.0, 5.0, 6.0]]


def test_the_first_word_is_found_behind_an_editors_mark(path):
    path.write_bytes(b"\xef\xbb\xbfcircle 1 2 3\n")
    assert list(read_vectors(path, {"circle": 3}, 3)) == [3]


def test_a_run_begins_with_the_vectors_and_counts_them(path):
    experiment = VQAExperiment(load_config("shapes-soft", TINY), path.parent)
    words = experiment.vocabulary.word_index
    assert experiment.model.embedding.weight[words["how"]].tolist() == [4.0, 5.0, 6.0]
    experiment.validation = None
    assert experiment.validate(experiment.model)["words_with_vectors"] == 2


def test_vectors_are_learnt_further(path):
    experiment = VQAExperiment(load_config("shapes-soft", TINY), path.parent)
    experiment.nll(experiment.model, experiment.collate(torch.arange(30))).backward()
    gradient = experiment.model.embedding.weight.grad
    assert gradient is not None
    assert bool(gradient[experiment.vocabulary.word_index["how"]].any())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("how 1 2", r"line 2 must be a word and word_dim = 3 numbers, separated by single spaces, got 'how 1 2\n'"),
        ("how 1 2 3 4", r"line 2 must be a word and word_dim = 3 numbers, separated by single spaces, got 'how 1 2 3 4\n'"),
        (
            "how\t1\t2\t3",
            r"line 2 must be a word and word_dim = 3 numbers, separated by single spaces, got 'how\t1\t2\t3\n'",
        ),
        ("how 1  2 3", "numbers, separated by single spaces, got"),
        ("", r"line 2 must be a word and word_dim = 3 numbers, separated by single spaces, got '\n'"),
        ("how 1 2 many", "line 2: the vector has an entry that is not a finite number"),
        ("how 1 2 nan", "line 2: the vector has an entry that is not a finite number"),
        ("how 1 2 1e99", "line 2: the vector has an entry that is not a finite number"),
    ],
)
def test_ragged_lines_and_odd_numbers_are_named(line, message, tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_text(f"what 1 2 3\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)):
        read_vectors(path, {"how": 2}, 3)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"word vectors .*nowhere\.txt cannot be read"):
        read_vectors(tmp_path / "nowhere.txt", {"how": 2}, 3)


def test_vectors_of_another_language_are_named(path):
    embedding = torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"vectors\.txt have none of the 2 words. Give vectors of their language"):
        load_vectors(embedding, path, {"wie": 2, "kreis": 3})
    assert not bool(embedding.any())
