"""SQuAD: files, windows and their labels, and a distribution over answers that equals the one counted span by span."""

import json
import sys
import types

import pytest
import torch
from language_files import squad_article, write_squad

from bayesattn_recipes.language import spans, squad
from bayesattn_recipes.language.model import tiny_tokenizer
from bayesattn_recipes.language.spans import answer, right_class, score_windows
from bayesattn_recipes.language.squad import Question, parse, windows
from bayesattn_recipes.language.tasks import TASKS
from data import shared_data


def make_question(context="The box is dark blue and heavy.", text="dark blue", question="What color?"):
    answers = () if text is None else ((text, context.index(text)),)
    return Question("q", question, context, answers, "T")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(["the box is dark blue and heavy . what color ? light red"])


def test_articles_are_not_shared_between_splits(tmp_path):
    splits, note = squad.load(TASKS["squad1"], write_squad(tmp_path, articles=23))
    titles = [{question.title for question in part} for part in splits.values()]
    assert [len(part) for part in titles] == [8, 5, 10]
    assert len(set.union(*titles)) == 23
    assert note == "the 23 articles of the dev file, split 8/5/10"


def test_training_file_leaves_the_dev_file_whole(tmp_path):
    write_squad(tmp_path / "squad", articles=3)
    articles = [squad_article(f"City{i}", [0]) for i in range(80)]
    (tmp_path / "squad" / "train-v1.1.json").write_text(json.dumps({"data": articles}))
    splits, note = squad.load(TASKS["squad1"], tmp_path)
    assert len(splits["test"]) == 6
    assert len(splits["train"]) + len(splits["validation"]) == 80
    assert not note


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-20], "not JSON"),
        (lambda text: text.replace('"data"', '"date"'), "has no 'data'"),
        (lambda text: text.replace('"answer_start": 22', '"answer_start": 23'), "is not at character 23"),
        (lambda text: text.replace("What color is box 0?", " "), "question and context must not be empty"),
        (lambda text: text.replace('"answers"', '"replies"'), "question 'Town0-0': 'answers' is missing"),
    ],
)
def test_bad_file_is_an_error_that_says_where(change, message, tmp_path):
    text = (write_squad(tmp_path, articles=1) / "dev-v1.1.json").read_text()
    changed = change(text)
    assert changed != text
    with pytest.raises(ValueError, match=r"^dev\.json") as raised:
        parse(changed, "dev.json")
    assert message in str(raised.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"dev-v2\.0\.json was not found"):
        squad.load(TASKS["squad2"], tmp_path)


def hub_rows(articles):
    return [
        {"id": f"{i}", "title": f"City{i}", "context": "A red box.", "question": "Which?"}
        | {"answers": {"text": ["red"], "answer_start": [2]} if i % 2 else {"text": [], "answer_start": []}}
        for i in range(articles)
    ]


@pytest.mark.parametrize(("name", "asked"), [("squad1", "rajpurkar/squad"), ("squad2", "rajpurkar/squad_v2")])
def test_source_datasets_asks_the_hub_for_squad(name, asked, monkeypatch):
    found = []

    def load_dataset(*names):
        found.append(names)
        return {"train": hub_rows(80), "validation": hub_rows(3)}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    splits, note = squad.load(TASKS[name], None, "datasets")
    assert found == [(asked,)]
    assert [question.answers for question in splits["test"]] == [(), (("red", 2),), ()]
    assert len(splits["train"]) + len(splits["validation"]) == 80
    assert not note


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": {"text": ["red"]}}, "train, row 0 is not in the hub's layout of SQuAD: KeyError: 'answer_start'"),
        (
            {"answers": {"text": ["red"], "answer_start": [3]}},
            "question '0': the answer 'red' is not at character 3",
        ),
        ({"context": None}, "train, row 0 is not in|question '0'"),
    ],
)
def test_bad_row_of_the_hub_is_an_error_that_says_where(change, message):
    with pytest.raises(ValueError, match=message):
        squad.from_rows([hub_rows(1)[0] | change], hub_rows(2))


def test_labels_of_a_window_are_the_tokens_of_the_answer(tokenizer):
    question = make_question()
    (window,) = windows(tokenizer, [question], 64)
    start, end = window.row["start_positions"], window.row["end_positions"]
    assert tokenizer.convert_ids_to_tokens(window.row["input_ids"])[start : end + 1] == ["dark", "blue"]
    assert question.context[window.offsets[start][0] : window.offsets[end][1]] == "dark blue"


def test_long_paragraph_is_cut_into_windows_and_labeled_where_the_answer_is(tokenizer):
    question = make_question(context="the box and " * 20 + "is light red", text="light red")
    pieces = windows(tokenizer, [question], 32)
    assert len(pieces) > 2
    assert [piece.row["start_positions"] > 0 for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    covered = {offset for piece in pieces for span in piece.offsets if span for offset in range(*span)}
    assert {i for i, letter in enumerate(question.context) if letter != " "} <= covered


def test_unanswerable_question_points_at_the_first_token(tokenizer):
    (window,) = windows(tokenizer, [make_question(text=None)], 64)
    assert (window.row["start_positions"], window.row["end_positions"]) == (0, 0)


@pytest.mark.parametrize("allows_none", [False, True])
def test_distribution_over_answers_is_that_of_all_spans(tokenizer, allows_none, monkeypatch):
    monkeypatch.setattr(spans, "MAX_ANSWER_TOKENS", 3)
    question = make_question()
    (window,) = windows(tokenizer, [question], 64)
    length, draws = len(window.row["input_ids"]), 5
    start, end = torch.randn(2, draws, 1, length)
    allowed = torch.tensor([[span is not None for span in window.offsets]])
    scored = score_windows(start, end, allowed, [squad.right_spans(question, window)])[0]
    found = answer(question, [(window, scored)], allows_none=allows_none)
    scores = {
        (i, j): (start[:, 0, i] + end[:, 0, j]).exp()
        for i in range(length)
        for j in range(i, min(i + 3, length))
        if allowed[0, i] and allowed[0, j]
    }
    null = (start[:, 0, 0] + end[:, 0, 0]).exp()
    total = sum(scores.values()) + (null if allows_none else 0.0)
    texts = {span: question.context[window.offsets[span[0]][0] : window.offsets[span[1]][1]] for span in scores}
    # float32 exponentials of sums, about 20 terms
    for rank, text in enumerate(found.texts[: spans.NUM_CANDIDATES]):
        expected = next(scores[span] for span in scores if texts[span] == text) / total
        torch.testing.assert_close(found.probabilities[:, rank], expected, atol=1e-5, rtol=1e-4)
    right = scores[window.row["start_positions"], window.row["end_positions"]] / total
    torch.testing.assert_close(found.right, right, atol=1e-5, rtol=1e-4)
    if allows_none:
        torch.testing.assert_close(found.probabilities[:, -2], null / total, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.probabilities.sum(dim=1), torch.ones(draws))
    best = max(scores, key=lambda span: float((start[:, 0, span[0]] + end[:, 0, span[1]]).mean()))
    assert texts[best] in found.texts
    assert found.probabilities.shape[1] == len(spans.class_names(allows_none=allows_none))


def test_right_spans_are_those_of_every_right_answer_once(tokenizer):
    context = "The box is dark blue and heavy."
    answers = (("dark blue", 11), ("dark blue", 11), ("blue", 16), ("heavy", 25))
    question = Question("q", "What?", context, answers, "T")
    (window,) = windows(tokenizer, [question], 64)
    found = [
        context[window.offsets[first][0] : window.offsets[last][1]] for first, last in squad.right_spans(question, window)
    ]
    assert found == ["dark blue", "blue", "heavy"]


def test_no_answer_is_right_where_there_is_none(tokenizer):
    question = make_question(text=None)
    (window,) = windows(tokenizer, [question], 64)
    start, end = torch.randn(2, 3, 1, len(window.offsets))
    (scores,) = score_windows(start, end, torch.tensor([[span is not None for span in window.offsets]]))
    found = answer(question, [(window, scores)], allows_none=True)
    torch.testing.assert_close(found.right, found.probabilities[:, -2], atol=1e-5, rtol=1e-4)


def test_same_answer_in_two_windows_counts_once(tokenizer):
    question = make_question()
    (window,) = windows(tokenizer, [question], 64)
    start = torch.full((1, 1, len(window.offsets)), -20.0)
    end = start.clone()
    start[..., window.row["start_positions"]] = end[..., window.row["end_positions"]] = 5.0
    (scores,) = score_windows(start, end, torch.tensor([[span is not None for span in window.offsets]]))
    found = answer(question, [(window, scores), (window, scores)], allows_none=False)
    assert found.texts[0] == "dark blue"
    # each window gives the span half of all mass
    assert float(found.probabilities[0, 0]) == pytest.approx(1.0, abs=1e-5)


def test_window_with_fewer_spans_than_candidates_has_empty_answers_of_no_mass(tokenizer):
    question = make_question(context="red", text="red")
    (window,) = windows(tokenizer, [question], 64)
    # two more tokens than the window has: padding of its batch
    length = len(window.offsets) + 2
    allowed = torch.tensor([[span is not None for span in window.offsets] + [False] * 2])
    (scores,) = score_windows(*torch.randn(2, 3, 1, length), allowed)
    found = answer(question, [(window, scores)], allows_none=False)
    assert found.texts == ["red", "", "", "", ""]
    # all but the least mass that "another answer" always has
    torch.testing.assert_close(found.probabilities[:, 0], torch.ones(3))
    assert float(found.probabilities[:, 1:5].sum()) == 0.0


def test_right_class_is_the_candidate_that_matches_after_normalization():
    found = spans.Answer(["red", "The dark, blue", "x", "y", "z", ""], torch.ones(1, 7) / 7, 0.0, torch.ones(1))
    assert right_class(make_question(), found, allows_none=True) == 1
    assert right_class(make_question(text=None), found, allows_none=True) == spans.NUM_CANDIDATES
    assert right_class(make_question(text="heavy"), found, allows_none=True) == 6


def test_ways_to_predict_share_their_labels():
    # of two draws, three questions and four classes, the last of them "another answer"
    drawn = torch.arange(24.0).reshape(2, 3, 4)
    own, common = torch.tensor([2, 1, 3]), torch.tensor([0, 1, 2])
    renamed = spans.exchange(drawn, own, common)
    rows = torch.arange(3)
    torch.testing.assert_close(renamed[:, rows, common], drawn[:, rows, own])
    torch.testing.assert_close(renamed[:, 1], drawn[:, 1])
    torch.testing.assert_close(renamed.sort(dim=2).values, drawn)


@pytest.mark.skipif(shared_data() is None, reason="the shared data folder is not there")
@pytest.mark.parametrize(("name", "articles", "questions"), [("squad1", 48, 10_570), ("squad2", 35, 11_873)])
def test_shared_files_are_whole(name, articles, questions):
    splits, note = squad.load(TASKS[name], shared_data())
    assert sum(map(len, splits.values())) == questions
    assert note.startswith(f"the {articles} articles")
