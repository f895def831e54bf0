"""transformers.pipeline with the doubt of every answer."""

import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

import bayesattn as ba
from bayesattn.integrations.hf import DoubtPipeline

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_texts import TEXTS, small_classifier, small_tokenizer


def make(model, **options):
    options = {"tokenizer": small_tokenizer(), "pipeline_class": DoubtPipeline, "device": "cpu", **options}
    return hf.pipeline("text-classification", model=model, **options)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("is_bayesian", [False, True])
def test_answers_are_those_of_the_stock_pipeline_and_doubt_that_of_uncertainty(is_bayesian, batch_size):
    model, tokenizer = small_classifier(), small_tokenizer()
    stock = hf.pipeline("text-classification", model=small_classifier(), tokenizer=tokenizer, device="cpu")(TEXTS)
    if is_bayesian:
        ba.bayesianize(model, ba.AttentionConfig("BAM-WC", weibull_k=2.0))
    found = make(model, batch_size=batch_size)(TEXTS)
    for text, plain, row in zip(TEXTS, stock, found, strict=True):
        expected = ba.uncertainty(model, dict(tokenizer(text, return_tensors="pt")))
        assert (row["label"], row["score"]) == (plain["label"], pytest.approx(plain["score"], rel=1e-5))
        assert set(row) == {"label", "score", "doubt", "t", "margin", "std"}
        for name, value in (
            ("doubt", expected.score),
            ("t", expected.t),
            ("margin", expected.margin),
            ("std", expected.std),
        ):
            assert row[name] == pytest.approx(float(value), rel=1e-3), name
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_converted_model_in_a_folder_is_loaded_like_any_other(tmp_path):
    model = small_classifier()
    model.save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    classify = hf.pipeline("text-classification", model=str(tmp_path), pipeline_class=DoubtPipeline, device="cpu")
    assert classify(TEXTS[0]) == make(model)(TEXTS[0])


def test_of_several_labels_the_most_probable_has_the_doubt():
    found = make(small_classifier())(TEXTS[:1], top_k=None)[0]
    assert [set(entry) == {"label", "score", "doubt", "t", "margin", "std"} for entry in found] == [True, False, False]
    assert sum(entry["score"] for entry in found) == pytest.approx(1.0)


def test_pairs_of_texts_are_taken():
    model = small_classifier()
    found = make(model)({"text": TEXTS[0], "text_pair": TEXTS[1]})
    expected = ba.uncertainty(model, dict(small_tokenizer()(TEXTS[0], TEXTS[1], return_tensors="pt")))
    assert found["doubt"] == pytest.approx(float(expected.score), rel=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_labels": 1, "id2label": {0: "stars"}, "label2id": {"stars": 0}},
        {"problem_type": "multi_label_classification"},
    ],
)
def test_models_without_a_margin_are_refused(changes):
    with pytest.raises(ValueError, match="a margin needs one label per text"):
        make(small_classifier(**changes))


def test_it_works_where_gradients_are_off():
    with torch.no_grad():
        assert make(small_classifier())(TEXTS[0])[0]["std"] > 0.0
