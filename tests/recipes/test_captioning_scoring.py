"""Caption measures: the two BLEUs agree, perfect is perfect, and whatever is missing is left out with its reason."""

import pytest

from bayesattn_recipes.captioning import scoring
from bayesattn_recipes.captioning.scoring import MEASURES, bleu, has_java, has_package, score

CAPTIONS = ["a dog runs on the grass", "two girls play with a ball on the beach", ""]
REFERENCES = [
    ["A dog running on grass .", "The dog runs on the green grass ."],
    ["Two girls are playing with a red ball on a beach .", "girls on the beach"],
    ["a man 's hat", "an empty road"],
]
needs_package = pytest.mark.skipif(not has_package(), reason="needs pycocoevalcap (the extra `captioning`)")


def test_bleu_of_a_reference_is_one_hundred():
    assert bleu([found[0] for found in REFERENCES], REFERENCES, order=3) == pytest.approx(100.0)


def test_bleu_one_is_clipped_precision_times_brevity():
    # "the" counts twice of four, and 4 words against the closest reference of 5: 100 · 2/4 · exp(1 − 5/4)
    value = bleu(["the the the the"], [["the cat on the mat"]], order=1)
    assert value == pytest.approx(100.0 * 0.5 * 2.718281828 ** (1 - 5 / 4), rel=1e-5)


@needs_package
def test_both_implementations_of_bleu_agree():
    scores = score(CAPTIONS, REFERENCES, use_java=False)
    for order in (1, 2, 3, 4):
        # the COCO code adds 1e-15 to every count
        assert scores.values[f"BLEU-{order}"] == pytest.approx(bleu(CAPTIONS, REFERENCES, order), rel=1e-6)


def test_of_two_references_equally_close_in_length_bleu_takes_the_shorter():
    # three words between two and four: as long as asked for, so no penalty
    assert bleu(["a b c"], [["a b c d", "a b"]], order=2) == pytest.approx(100.0)


@needs_package
def test_without_java_the_plain_tokenizer_is_used_and_said():
    scores = score(CAPTIONS, REFERENCES, use_java=False)
    assert scores.tokenizer == "plain"
    assert scores.skipped == {"METEOR": scoring.NO_JAVA}
    assert {*scores.values, *scores.skipped} == set(MEASURES)


@needs_package
@pytest.mark.skipif(not has_java(), reason="needs Java")
def test_with_java_every_measure_is_there_and_a_better_caption_scores_higher():
    good = score(CAPTIONS, REFERENCES)
    assert (set(good.values), good.skipped, good.tokenizer) == (set(MEASURES), {}, "PTB")
    bad = score(["a cat", "the dog runs", ""], REFERENCES, use_java=False)
    assert all(good.values[name] > bad.values[name] for name in bad.values)
    # what METEOR 1.5 gave for these sentences when this was written: its options must not change
    assert good.values["METEOR"] == pytest.approx(30.9733, abs=1e-3)


def test_without_the_package_only_bleu_is_left(monkeypatch):
    monkeypatch.setattr(scoring, "has_package", lambda: False)
    scores = score(CAPTIONS, REFERENCES, use_java=False)
    assert set(scores.values) == {"BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4"}
    assert scores.skipped == dict.fromkeys(("CIDEr", "ROUGE-L", "METEOR"), scoring.NO_PACKAGE)


@pytest.mark.parametrize(
    ("captions", "references", "message"),
    [
        ([], [], "must have the same number of entries, at least 1, got 0 and 0"),
        (["a"], [["a"], ["b"]], "must have the same number of entries, at least 1, got 1 and 2"),
        (["a", "b"], [["a"], ["...", ""]], "entry 1 must have at least one reference with a word, got none"),
    ],
)
def test_impossible_comparisons_are_refused(captions, references, message):
    with pytest.raises(ValueError, match=message):
        score(captions, references, use_java=False)


def test_java_that_is_not_there_is_not_pretended(monkeypatch):
    monkeypatch.setattr(scoring, "has_java", lambda: False)
    with pytest.raises(ValueError, match="use_java is True, but this needs Java"):
        score(CAPTIONS, REFERENCES, use_java=True)
