"""GLUE's and SQuAD's metrics on cases worked by hand, and against scipy and scikit-learn."""

import math

import pytest
import torch
from scipy import stats
from sklearn import metrics as sk

from bayesattn_recipes.language import metrics

PREDICTED = torch.tensor([1, 1, 0, 1, 0, 0, 1])
LABELS = torch.tensor([1, 0, 0, 1, 1, 0, 0])


def test_accuracy_counts_the_right_ones():
    assert metrics.accuracy(PREDICTED, LABELS) == pytest.approx(4 / 7)


def test_f1_by_hand():
    # TP 2 (places 0, 3), FP 2 (1, 6), FN 1 (4): 2·2 / (2·2 + 2 + 1)
    assert metrics.f1(PREDICTED, LABELS) == pytest.approx(4 / 7)


def test_matthews_by_hand():
    # TP 2, FP 2, FN 1, TN 2: (2·2 − 2·1) / sqrt((2+2)(2+1)(2+2)(2+1))
    assert metrics.matthews(PREDICTED, LABELS) == pytest.approx(2 / 12)


@pytest.mark.parametrize("seed", range(3))
def test_binary_metrics_agree_with_scikit_learn(seed):
    generator = torch.Generator().manual_seed(seed)
    predicted, labels = torch.randint(0, 2, (2, 101), generator=generator)
    assert metrics.f1(predicted, labels) == pytest.approx(sk.f1_score(labels, predicted))
    assert metrics.matthews(predicted, labels) == pytest.approx(sk.matthews_corrcoef(labels, predicted))


def test_correlations_by_hand():
    x, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 4.0, 3.0])
    # deviations (−1, 0, 1) and (−5/3, 4/3, 1/3): 2 / sqrt(2 · 42/9)
    assert metrics.pearson(x, y) == pytest.approx(2 / math.sqrt(2 * 42 / 9))
    # ranks (1, 2, 3) and (1, 3, 2): 1 − 6·2 / (3·8)
    assert metrics.spearman(x, y) == pytest.approx(0.5)


def test_spearman_shares_ranks_among_equal_values():
    x = torch.tensor([0.5, 0.5, 2.0, 3.0, 3.0, 3.0, -1.0])
    y = torch.tensor([1.0, 2.0, 2.0, 5.0, 4.0, 4.0, 0.0])
    assert metrics.spearman(x, y) == pytest.approx(stats.spearmanr(x, y)[0])
    assert metrics.pearson(x, y) == pytest.approx(stats.pearsonr(x, y)[0])


@pytest.mark.parametrize("name", ["f1", "matthews", "pearson", "spearman"])
def test_a_constant_prediction_is_worth_nothing(name):
    kind = torch.float64 if name in ("pearson", "spearman") else torch.int64
    assert metrics.GLUE_METRICS[name](torch.zeros(5, dtype=kind), torch.tensor([0, 1, 1, 0, 1], dtype=kind)) == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Big, Apple!", "big apple"),
        ("an answer: a theory", "answer theory"),
        ("U.S.", "us"),
        ("  the ", ""),
        ("1,000", "1000"),
    ],
)
def test_answers_are_normalized_as_squad_does(text, expected):
    assert metrics.normalize_answer(text) == expected


def test_exact_match_takes_any_right_answer():
    assert metrics.exact_match("the Apple.", ["pear", "apple"]) == 1.0
    assert metrics.exact_match("apples", ["pear", "apple"]) == 0.0


def test_token_f1_by_hand_takes_the_best_right_answer():
    # "in blue box" and "blue box": 2 words in common, 2·2 / (3 + 2)
    assert metrics.token_f1("in the blue box", ["red", "a blue box"]) == pytest.approx(4 / 5)
    # repeated words count as often as both have them: 2·1 / (2 + 1)
    assert metrics.token_f1("blue blue", ["blue"]) == pytest.approx(2 / 3)


@pytest.mark.parametrize(("answer", "golds", "expected"), [("", [], 1.0), ("x", [], 0.0), ("", ["x"], 0.0)])
def test_no_answer_is_right_only_where_there_is_none(answer, golds, expected):
    assert metrics.exact_match(answer, golds) == expected
    assert metrics.token_f1(answer, golds) == expected


def test_best_threshold_by_hand():
    # by null score: question 2 (answer worth 1), 0 (none), 3 (worth 0.5), 1 (none)
    null, answered, has = [0.0, 2.0, -1.0, 1.0], [0.0, 0.0, 1.0, 0.5], [False, False, True, True]
    # thresholds −∞: 2; −1: 3; 0: 2; 1: 2.5; 2: 1.5
    assert metrics.best_null_threshold(null, answered, has) == (-1.0, 3 / 4)


def test_threshold_does_not_part_equal_scores():
    # answering only the first would give 2 of 2, but both have the same null score
    threshold, score = metrics.best_null_threshold([0.5, 0.5], [1.0, 0.0], [True, False])
    assert (threshold, score) == (-math.inf, 0.5)
