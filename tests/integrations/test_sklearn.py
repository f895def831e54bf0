"""A trained model as a scikit-learn classifier."""

import numpy as np
import pytest
import torch
import transformers as hf
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import LeaveOneOut, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from small_texts import LABELS, TEXTS, WORDS, small_classifier, small_tokenizer
from torch import nn

import bayesattn as ba
from bayesattn.doubt.texts import token_limit
from bayesattn.integrations.hf.doubt import doubt_texts
from bayesattn.integrations.sklearn import DoubtClassifier

N = 41


def encoder() -> nn.Module:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(40, 3)).eval()


@pytest.fixture
def data() -> tuple[nn.Module, np.ndarray, torch.Tensor]:
    model, inputs = encoder(), torch.randn(N, 5, 8, generator=torch.Generator().manual_seed(2))
    return model, inputs.double().numpy(), inputs


@pytest.mark.parametrize("batch_size", [1, 7, N, 100])
def test_it_says_what_the_model_and_uncertainty_say(data, batch_size):
    model, X, inputs = data
    classifier = DoubtClassifier(model, batch_size=batch_size)
    expected = ba.uncertainty(model, inputs)
    np.testing.assert_allclose(classifier.predict_proba(X), expected.probabilities.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(classifier.predict_uncertainty(X), expected.score.numpy(), rtol=1e-4)
    assert (classifier.predict(X) == expected.label.numpy()).all()
    assert classifier.classes_.tolist() == [0, 1, 2]


def test_columns_follow_the_sorted_classes(data):
    model, X, _ = data
    names = ["zebra", "ant", "mole"]
    classifier = DoubtClassifier(model, classes=names)
    probabilities, plain = classifier.predict_proba(X), DoubtClassifier(model).predict_proba(X)
    assert classifier.classes_.tolist() == ["ant", "mole", "zebra"]
    np.testing.assert_array_equal(probabilities, plain[:, [1, 2, 0]])
    assert classifier.predict(X).tolist() == [names[i] for i in plain.argmax(axis=1)]
    # a metric that only knows the sorted labels agrees with the definition
    y = [names[i % 3] for i in range(N)]
    assert log_loss(y, probabilities) == pytest.approx(-np.mean([np.log(plain[i, i % 3]) for i in range(N)]), rel=1e-5)


def test_scikit_learns_tools_take_it(data):
    model, X, _ = data
    rng = np.random.default_rng(0)
    classifier = DoubtClassifier(model)
    predicted = classifier.predict(X)
    y = np.where(rng.random(N) < 0.3, (predicted + 1) % 3, predicted)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert np.mean(cross_val_score(classifier, X, y, cv=LeaveOneOut())) == pytest.approx(np.mean(predicted == y))
    found = cross_val_predict(classifier, X, y, cv=3, method="predict_proba")
    np.testing.assert_allclose(found, classifier.predict_proba(X), rtol=1e-5, atol=1e-6)
    calibrated = CalibratedClassifierCV(FrozenEstimator(classifier), method="sigmoid").fit(X, y)
    np.testing.assert_allclose(calibrated.predict_proba(X).sum(axis=1), 1.0)
    wrong, doubt = classifier.predict(X) != y, classifier.predict_uncertainty(X)
    assert roc_auc_score(wrong, doubt) == pytest.approx(
        float(ba.metrics.auroc(torch.tensor(doubt[~wrong]), torch.tensor(doubt[wrong])))
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_it_is_the_last_step_of_a_pipeline(data):
    model, X, _ = data
    alone = DoubtClassifier(model)
    y = alone.predict(X)
    # as a pipeline gets them: two axes, other units
    rows = 10.0 * X.reshape(N, -1)
    pipeline = make_pipeline(FunctionTransformer(lambda x: x.reshape(len(x), 5, 8) / 10.0), DoubtClassifier(model)).fit(
        rows, y
    )
    np.testing.assert_allclose(pipeline.predict_proba(rows), alone.predict_proba(X), rtol=1e-4, atol=1e-6)
    assert pipeline.score(rows, y) == 1.0
    doubt = pipeline[-1].predict_uncertainty(pipeline[:-1].transform(rows))
    np.testing.assert_allclose(doubt, alone.predict_uncertainty(X), rtol=1e-3)
    held_out = cross_val_predict(pipeline, rows, y, cv=3, method="predict_proba")
    np.testing.assert_allclose(held_out, alone.predict_proba(X), rtol=1e-4, atol=1e-6)


def test_clones_share_the_model(data):
    copy = clone(DoubtClassifier(data[0], classes=["a", "b", "c"], batch_size=3))
    assert copy.model is data[0]
    assert (copy.classes, copy.batch_size) == (["a", "b", "c"], 3)


def test_texts_and_pairs_go_through_the_tokenizer():
    model, tokenizer = small_classifier(), small_tokenizer()
    classifier = DoubtClassifier(model, tokenizer, classes=list(LABELS.values()), batch_size=4)
    for X in (TEXTS, [(text, "it is") for text in TEXTS], np.array(TEXTS, dtype=object)):
        columns = [list(column) for column in zip(*X)] if isinstance(X[0], tuple) else [list(X)]
        expected = ba.uncertainty(model, dict(tokenizer(*columns, padding=True, return_tensors="pt")))
        np.testing.assert_allclose(classifier.predict_uncertainty(X), expected.score.numpy(), rtol=1e-3)
        assert classifier.predict(X).tolist() == [LABELS[i] for i in expected.label.tolist()]
    # longer than the model's positions
    assert classifier.predict_uncertainty(["a good film " * 20]).shape == (1,)


# RoBERTa counts positions from the padding token's; T5 has none, so nothing limits it
@pytest.mark.parametrize(("kind", "most"), [("roberta", 16), ("t5", 512)])
def test_long_texts_are_cut_to_the_positions_a_model_has(kind, most):
    config = {"vocab_size": len(WORDS), "num_labels": 3, "pad_token_id": 0}
    if kind == "roberta":
        sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 29}
        model = hf.RobertaForSequenceClassification(hf.RobertaConfig(**config, **sizes, max_position_embeddings=17))
    else:
        sizes = {"d_model": 24, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 3, "d_kv": 8, "d_ff": 29}
        model = hf.T5ForSequenceClassification(hf.T5Config(**config, **sizes, eos_token_id=3, decoder_start_token_id=0))
    tokenizer = small_tokenizer(model_max_length=None)
    assert token_limit(model.eval(), tokenizer) == most
    # [CLS] and [SEP] are added
    for length in (most - 2, most - 1, 2 * most):
        text = " ".join(["good"] * length)
        assert DoubtClassifier(model, tokenizer).predict_uncertainty([text]).shape == (1,)
        (found,) = doubt_texts(model, tokenizer, [text])
        assert found.text == text
    assert token_limit(model, small_tokenizer(model_max_length=11)) == 11


@pytest.mark.parametrize(
    ("options", "act", "message"),
    [
        (
            {"classes": ["a", "b"]},
            lambda c, X: c.predict_proba(X),
            "classes must have 3 labels, one per output of the model, got 2",
        ),
        (
            {"classes": ["a", "b", "a"]},
            lambda c, X: c.classes_,
            "classes must be different labels, one per output of the model, got",
        ),
        ({}, lambda c, X: c.fit(X, ["ant"] * N), r"y has the labels \['ant'\], but the model has \[0, 1, 2\]"),
        ({"batch_size": 0}, lambda c, X: c.predict(X), "batch_size must be an integer of at least 1, got 0"),
        ({}, lambda c, X: c.predict_proba(X[:0]), "X must hold at least one example, got none"),
        (
            {"tokenizer": small_tokenizer()},
            lambda c, X: c.predict(["a", ("a", "b")]),
            "X must be texts or pairs of texts, not both",
        ),
        (
            {"tokenizer": small_tokenizer()},
            lambda c, X: c.predict("a good film"),
            r"X must be a list of texts or of pairs of texts, got the string 'a good film'. For one text give \[text\]",
        ),
        ({"tokenizer": small_tokenizer()}, lambda c, X: c.fit("a good film", [0]), "X must be a list of texts"),
        ({}, lambda c, X: c.predict_uncertainty("a good film"), "X must be a list of texts"),
    ],
)
def test_what_does_not_fit_is_refused(data, options, act, message):
    with pytest.raises(ValueError, match=message):
        act(DoubtClassifier(data[0], **options), data[1])


def test_unknown_classes_are_found_by_fit(data):
    model, X, _ = data
    classifier = DoubtClassifier(model)
    assert not hasattr(classifier, "classes_")
    assert classifier.fit(X, np.zeros(N, dtype=int)).classes_.tolist() == [0, 1, 2]


def test_models_with_several_labels_per_text_are_refused():
    model = small_classifier()
    model.config.problem_type = "multi_label_classification"
    with pytest.raises(ValueError, match="multi_label_classification"):
        DoubtClassifier(model, small_tokenizer()).predict_proba(TEXTS)
