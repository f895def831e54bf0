"""Prediction: M seeded draws, their summaries against definitions, and nothing left changed."""

import copy
import math
import pickle

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn
from transformers import BertConfig, BertForQuestionAnswering

import bayesattn as ba
from bayesattn import Prediction, predict, sampling
from helpers import no_type_checks

BATCH, LENGTH, DIM, CLASSES = 3, 5, 8, 4
NOISY = ba.AttentionConfig("BAM-WC", weibull_k=1.0)


class _Model(nn.Module):
    def __init__(self, config: ba.AttentionConfig = NOISY, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = ba.nn.MultiheadAttention(DIM, 2, dropout=dropout, batch_first=True, config=config)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(DIM, CLASSES)
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor, shift: float | torch.Tensor = 0.0) -> torch.Tensor:
        self.calls.append(x.shape[0])
        return self.head(self.drop(self.attention(x, x, x, need_weights=False)[0].mean(dim=1))) + shift


X = torch.randn(BATCH, LENGTH, DIM, generator=torch.Generator().manual_seed(8))


def test_samples_are_draws_of_the_model_in_order():
    """Each example keeps its place: with vanishing noise every draw is the eval output of that example."""
    model = _Model(ba.AttentionConfig("BAM-NOKL", weibull_k=1e12))
    pred = predict(model, X, num_samples=7, seed=1)
    assert pred.samples.shape == (7, BATCH, CLASSES)
    expected = model.eval()(X).detach()
    torch.testing.assert_close(pred.logits, expected.expand(7, BATCH, CLASSES), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pred.samples, torch.softmax(pred.logits, dim=-1))
    torch.testing.assert_close(pred.mean, pred.samples.mean(dim=0))


def test_the_seed_decides_and_the_global_generator_stays_put():
    model = _Model()
    state = torch.get_rng_state()
    first, again, other = (predict(model, X, num_samples=5, seed=seed).samples for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # every draw and every example has noise of its own
    flat = first.flatten(0, 1)
    assert len({tuple(row.tolist()) for row in flat}) == flat.shape[0]


def test_manual_seed_governs_a_call_without_a_seed():
    model = _Model()
    results = []
    for seed in (4, 4, 5):
        torch.manual_seed(seed)
        results.append(predict(model, X, num_samples=3).samples)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_the_model_comes_back_as_it_was_module_by_module():
    """A part that its owner keeps in eval mode, such as a frozen encoder, must still be there afterwards."""
    model = _Model()
    model.train()
    model.drop.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    predict(model, X, num_samples=2, seed=0)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert not model.attention.samples_in_eval
    model.head.bias = nn.Parameter(torch.zeros(CLASSES + 1))  # the forward pass now fails
    with pytest.raises(RuntimeError):
        predict(model, X, num_samples=2, seed=0)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert not model.attention.samples_in_eval


def test_no_graph_is_kept():
    assert not predict(_Model(), X, num_samples=2).logits.requires_grad


def test_sequences_mappings_and_other_objects_are_arguments():
    model = _Model(ba.AttentionConfig("BAM-NOKL", weibull_k=1e12))
    shift = torch.arange(float(CLASSES))
    reference = model.eval()(X, shift).detach()
    for inputs in ((X, shift), [X, shift], {"x": X, "shift": shift}):
        logits = predict(model, inputs, num_samples=2, seed=0).logits
        torch.testing.assert_close(logits[1], reference, rtol=1e-4, atol=1e-5)

    class Data:
        x, shift = X, torch.arange(float(CLASSES))

    plain = model.forward
    model.forward = lambda data: plain(data.x, data.shift)
    torch.testing.assert_close(predict(model, Data(), 2, seed=0).logits[1], reference, rtol=1e-4, atol=1e-5)


def test_the_logits_are_found_in_what_models_return():
    class Wrapped(nn.Module):
        def __init__(self, wrap) -> None:
            super().__init__()
            self.inner, self.wrap = _Model(), wrap

        def forward(self, x: torch.Tensor):
            return self.wrap(self.inner(x))

    class Output:
        def __init__(self, logits: torch.Tensor) -> None:
            self.logits = logits

    expected = predict(Wrapped(lambda x: x), X, num_samples=2, seed=0).logits.shape
    for wrap in (lambda x: (x, None), Output, lambda x: {"loss": None, "logits": x}):
        assert predict(Wrapped(wrap), X, num_samples=2, seed=0).logits.shape == expected
    chosen = predict(Wrapped(lambda x: {"y": x}), X, num_samples=2, seed=0, output=lambda result: result["y"])
    assert chosen.logits.shape == expected
    with pytest.raises(ValueError, match=r"the model must return a tensor, .*, got dict. Give `output`"):
        predict(Wrapped(lambda x: {"y": x}), X, num_samples=2)


def test_question_answering_is_told_to_use_spans():
    match = r"the model returned start_logits and end_logits.*`target=\"span\"`.*`output`"
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9)
    with pytest.raises(ValueError, match=match):
        ba.uncertainty(BertForQuestionAnswering(config).eval(), {"input_ids": torch.ones(2, 3, dtype=torch.long)})


def test_entropy_and_mutual_information_by_definition():
    probabilities = torch.softmax(torch.randn(6, BATCH, CLASSES, dtype=torch.float64), dim=-1)
    pred = Prediction(samples=probabilities, logits=probabilities.log(), task="multiclass")
    mean = probabilities.mean(dim=0).numpy()
    total = np.array([scipy.stats.entropy(row) for row in mean])
    expected = np.array([[scipy.stats.entropy(row) for row in draw] for draw in probabilities.numpy()]).mean(axis=0)
    np.testing.assert_allclose(pred.entropy, total, rtol=1e-12)
    np.testing.assert_allclose(pred.mutual_information, total - expected, rtol=1e-9)


def test_draws_that_agree_carry_no_mutual_information_and_extremes_no_nan():
    certain = torch.zeros(4, 2, 3)
    certain[..., 1] = 1.0
    pred = Prediction(samples=certain, logits=certain, task="multiclass")
    assert torch.equal(pred.entropy, torch.zeros(2))
    assert torch.equal(pred.mutual_information, torch.zeros(2))
    split = torch.eye(2)[:, None]  # two draws, each certain of another class
    pred = Prediction(samples=split, logits=split, task="multiclass")
    assert float(pred.entropy) == pytest.approx(math.log(2))
    assert float(pred.mutual_information) == pytest.approx(math.log(2))


def test_multilabel_sums_binary_entropies_and_regression_has_none():
    p = torch.rand(5, BATCH, CLASSES, dtype=torch.float64)
    pred = Prediction(samples=p, logits=torch.logit(p), task="multilabel")
    mean = p.mean(dim=0).numpy()
    expected = -(mean * np.log(mean) + (1 - mean) * np.log(1 - mean)).sum(axis=-1)
    np.testing.assert_allclose(pred.entropy, expected, rtol=1e-12)
    pred = predict(_Model(), X, num_samples=3, seed=0, task="regression")
    assert torch.equal(pred.samples, pred.logits)
    for name in ("entropy", "mutual_information", "p_value"):
        with pytest.raises(ValueError, match="is defined for task 'multiclass' and 'multilabel', got 'regression'"):
            getattr(pred, name)


def test_the_p_value_is_a_paired_t_test_of_the_two_likeliest_classes():
    pred = predict(_Model(), X, num_samples=20, seed=3)
    assert pred.p_value.shape == (BATCH,)
    top = pred.mean.topk(2, dim=-1).indices
    for example in range(BATCH):
        first, second = (pred.samples[:, example, int(c)].double().numpy() for c in top[example])
        expected = scipy.stats.ttest_rel(first, second).pvalue
        assert float(pred.p_value[example]) == pytest.approx(expected, rel=1e-3, abs=1e-12)


def test_multilabel_predictions_have_a_p_value():
    pred = predict(_Model(), X, num_samples=9, seed=3, task="multilabel")
    assert bool(((pred.p_value >= 0.0) & (pred.p_value <= 1.0)).all())


def test_a_p_value_needs_two_draws():
    pred = predict(_Model(), X, num_samples=1, seed=0)
    with pytest.raises(ValueError, match="a p-value needs at least 2 draws, got num_samples=1"):
        _ = pred.p_value


def test_sampling_draws_in_eval_mode_and_only_inside():
    model = _Model(dropout=0.5).eval()
    mean = model(X)
    with sampling(model) as same:
        assert same is model
        assert not torch.equal(model(X), model(X))
        assert not model.drop.training
    assert torch.equal(model(X), mean)


def test_scopes_of_sampling_add_up_and_each_ends_alone():
    """The inner scope must not forget what the outer one asked for, neither while it is open nor when it closes."""
    for dropouts in ((False, False), (True, False), (False, True), (True, True)):
        model = _Model(dropout=0.5).eval()

        def switches(model=model) -> tuple[bool, bool, bool]:
            return model.attention.samples_in_eval, model.attention.drops_in_eval, model.drop.training

        outer, inner = dropouts
        with sampling(model, dropout=outer):
            with sampling(model, dropout=inner):
                assert switches() == (True, outer or inner, outer or inner), dropouts
            assert switches() == (True, outer, outer), dropouts
            assert not torch.equal(model(X), model(X))
        assert switches() == (False, False, False), dropouts
        assert torch.equal(model(X), model(X))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_made_while_sampling_does_not_sample(copied):
    model = _Model(dropout=0.5).eval()
    mean = model(X)
    with sampling(model, dropout=True):
        twin = copied(model).eval()
        assert torch.equal(twin(X), mean)
        assert not torch.equal(model(X), model(X))
    assert torch.equal(twin(X), mean)
    with sampling(twin):
        assert not torch.equal(twin(X), twin(X))


def test_dropout_is_a_switch_of_its_own():
    """Dropout in the layers and inside the attention, with and without attention noise."""
    for part in ("drop", "attention"):
        model = _Model(ba.AttentionConfig("soft"), dropout=0.5).eval()
        setattr(model, part, nn.Identity()) if part == "attention" else setattr(model, part, nn.Dropout(0.0))
        if part == "attention":
            model.forward = lambda x, model=model: model.head(model.drop(x.mean(dim=1)))
        with sampling(model, dropout=True):
            assert not torch.equal(model(X), model(X)), part
        assert torch.equal(model(X), model(X))
        assert not model.training
    quiet = _Model(ba.AttentionConfig("BAM-NOKL", weibull_k=1e12), dropout=0.5).eval()
    mean = quiet(X)
    with sampling(quiet):
        torch.testing.assert_close(quiet(X), mean, rtol=1e-4, atol=1e-5)
    with sampling(quiet, dropout=True):
        assert not torch.allclose(quiet(X), mean, rtol=1e-2)


def test_dropout_of_stock_transformer_layers_is_sampled_too():
    """Their fused path, taken in eval mode, would skip the dropout modules that were switched on."""
    layer = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.5, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 1), nn.Flatten(), nn.Linear(LENGTH * DIM, CLASSES)).eval()
    assert float(predict(model, X, num_samples=4, seed=0, dropout=True).samples.std(dim=0).min()) > 0.0
    assert torch.backends.mha.get_fastpath_enabled()
    attention_only = nn.MultiheadAttention(DIM, 2, dropout=0.5, batch_first=True).eval()
    with sampling(attention_only, dropout=True):
        assert not torch.equal(attention_only(X, X, X)[0], attention_only(X, X, X)[0])
    assert not attention_only.training


def test_nothing_to_sample_is_an_error_not_a_flat_answer():
    for model in (nn.Linear(DIM, CLASSES), _Model(ba.AttentionConfig("soft"))):
        with (
            pytest.raises(ValueError, match=r"model must have stochastic attention, got .* Convert it with bayesianize"),
            sampling(model),
        ):
            pass
    with (
        pytest.raises(ValueError, match="model must have stochastic attention, got Linear"),
        sampling(nn.Linear(2, 2), dropout=True),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_samples": 0}, "num_samples must be an integer of at least 1, got 0"),
        ({"num_samples": 2.5}, "num_samples must be an integer of at least 1, got 2.5"),
        ({"chunk_size": 0}, "chunk_size must be an integer of at least 1, got 0"),
        ({"task": "ranking"}, "task must be one of 'multiclass', 'multilabel', 'regression', got 'ranking'"),
        ({"inputs": 3}, "inputs must be a tensor, a sequence, a mapping, or an object such as PyG's Data, got int"),
        ({"inputs": "text"}, "inputs must be a tensor, a sequence, a mapping, or an object .*, got str"),
        ({"inputs": None}, "inputs must be a tensor, a sequence, a mapping, or an object .*, got NoneType"),
    ],
)
def test_bad_arguments_are_refused_by_name_before_the_model_runs(options, named, monkeypatch):
    no_type_checks(monkeypatch)
    model = _Model()
    with pytest.raises(ValueError, match=named):
        predict(model, **{"inputs": X, **options})
    assert model.calls == []
    assert model.training
