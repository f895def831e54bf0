"""The closed form against tiny-noise draws and autograd; what it says, leaves alone and refuses."""

import copy
import math
import warnings

import pytest
import torch
from scipy import stats
from small_models import BUILD, CLASSES, SMALL, B, N, build, logits_of, tokens
from torch import nn

import bayesattn as ba
from helpers import no_type_checks

TINY = ba.AttentionConfig("BAM-NOKL", weibull_k=3000.0)


def snapshot(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modules = [
        (name, type(module), module.training, len(module._forward_pre_hooks)) for name, module in model.named_modules()
    ]
    return state, modules, [(name, p.requires_grad, p.grad) for name, p in model.named_parameters()]


def assert_unchanged(model, before):
    after = snapshot(model)
    assert list(before[0]) == list(after[0])
    assert all(torch.equal(before[0][name], after[0][name]) for name in after[0])
    assert before[1:] == after[1:]


@pytest.mark.parametrize("name", BUILD)
def test_parts_add_up_and_predictions_are_the_models_own(name):
    model, inputs = build(name)
    with torch.no_grad():
        logits = logits_of(model, inputs)
    before = snapshot(model)
    result = ba.uncertainty(model, inputs)
    assert torch.equal(result.probabilities, logits.softmax(-1))
    assert torch.equal(result.label, logits.argmax(-1))
    top = logits.topk(2).values
    assert torch.allclose(result.margin, top[:, 0] - top[:, 1], rtol=1e-12)
    variance = result.std.square()
    assert (variance > 0).all()
    for parts in (result.by_layer.values(), [heads.sum(-1) for heads in result.by_head.values()]):
        assert torch.allclose(sum(parts), variance, rtol=1e-10)
    if name == "bart":
        assert result.by_token is not None  # both sequences have the same length
    if result.by_token is not None and name not in ("own-sdpa", "bart"):
        assert result.by_token.shape == (B, N)
        assert torch.allclose(result.by_token.sum(-1), variance, rtol=1e-10)
        assert (result.by_token[1, 5:] == 0).all()
    assert_unchanged(model, before)


@pytest.mark.parametrize("name", ["albert", "deberta-v2", "gemma-window", "bart", "own-sdpa", "torch-encoder"])
def test_equals_the_variance_of_draws_with_tiny_noise(name):
    model, inputs = build(name)
    exact = ba.uncertainty(model, inputs, config=TINY)
    draws = 200
    drawn = ba.uncertainty(model, inputs, config=TINY, method="draws", num_samples=draws)
    # a sample variance of normal numbers has a relative standard error of √(2/(M−1)); five of them over all examples
    error = math.sqrt(2.0 / (draws - 1))
    assert ((drawn.std / exact.std).square() - 1.0).abs().max() < 5.0 * error
    assert drawn.by_layer == {}
    assert torch.equal(drawn.probabilities, exact.probabilities)


def test_equals_the_variance_of_a_hundred_thousand_draws():
    model, inputs = build("bert-sdpa")
    inputs = {name: value[1:2, :5] for name, value in inputs.items()}
    exact = ba.uncertainty(model, inputs, config=TINY)
    ba.bayesianize(model, TINY)
    many = {name: value.repeat(5000, 1) for name, value in inputs.items()}
    pair = exact.probabilities.topk(2).indices.repeat(5000, 1)
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad(), ba.sampling(model):
        for _ in range(20):
            top = model(**many).logits.gather(1, pair)
            moved = (top[:, 0] - top[:, 1]) - exact.margin
            total += torch.stack([moved.sum(0), moved.square().sum(0)])
    mean, square = total / 1e5
    ratio = (square - mean.square()) / exact.std.square()
    assert (ratio - 1.0).abs() < 4.0 * math.sqrt(2.0 / 1e5)


def test_equals_autograd_where_the_scores_can_be_reached():
    # one layer, one head: an additive mask of four axes is added to the scores, and its gradient is theirs
    torch.manual_seed(0)
    model, inputs = build("bert-eager")
    model.bert.encoder.layer = model.bert.encoder.layer[:1]
    attention = model.bert.encoder.layer[0].attention.self
    attention.num_attention_heads, attention.attention_head_size = 1, 24
    attention.scaling = 24**-0.5
    added = torch.zeros(B, 1, N, N, dtype=torch.float64, requires_grad=True)
    logits = model(inputs["input_ids"], attention_mask=added).logits
    top = logits.topk(2).values
    (grad,) = torch.autograd.grad((top[:, 0] - top[:, 1]).sum(), added)
    result = ba.uncertainty(model, {"input_ids": inputs["input_ids"], "attention_mask": added.detach()})
    variance = math.pi**2 / (6 * 5.0**2)
    assert torch.allclose(result.by_token, variance * grad.square().sum(dim=(1, 2)), rtol=1e-9)


@pytest.mark.parametrize("name", ["bert-sdpa", "albert", "torch-encoder", "gemma-window"])
def test_examples_do_not_mix(name):
    model, inputs = build(name)
    before = ba.uncertainty(model, inputs)
    changed = copy.deepcopy(inputs)
    if isinstance(changed, dict):
        changed["input_ids"][0, :3] = torch.tensor([5, 9, 13])
    else:
        changed[0][0] += 1.0
    after = ba.uncertainty(model, changed)
    assert before.std[0] != after.std[0]
    assert torch.allclose(before.std[1:], after.std[1:], rtol=1e-9)
    assert torch.allclose(before.by_token[1:], after.by_token[1:], rtol=1e-9)


def test_noise_only_scales_and_the_ranking_stays():
    model, inputs = build("bert-sdpa")
    five = ba.uncertainty(model, inputs)
    ten = ba.uncertainty(model, inputs, config=ba.AttentionConfig("BAM-NOKL", weibull_k=10.0))
    normal = ba.uncertainty(model, inputs, config=ba.AttentionConfig("BAM-LF", sigma_q=0.3))
    assert torch.allclose(five.std, 2.0 * ten.std)
    assert torch.allclose(normal.std, five.std * (0.3 * 5.0 * math.sqrt(6.0) / math.pi))
    assert torch.equal(five.score.argsort(), ten.score.argsort())
    assert torch.allclose(five.t, five.margin / five.std)
    assert torch.equal(five.score, -five.t)


def test_p_value_is_the_papers_at_m_draws():
    model, inputs = build("bert-sdpa")
    result = ba.uncertainty(model, inputs, config=ba.AttentionConfig("BAM-NOKL", weibull_k=0.05), num_samples=7)
    expected = 2.0 * stats.t.sf(result.t.numpy() * math.sqrt(7), df=6)
    assert torch.allclose(result.p_value, torch.as_tensor(expected), rtol=1e-6)
    assert (result.p_value > 1e-4).all()


def test_a_converted_model_keeps_its_own_noise():
    model, inputs = build("bert-sdpa")
    plain = ba.uncertainty(model, inputs, config=ba.AttentionConfig("BAM-NOKL", weibull_k=2.0))
    ba.bayesianize(model, ba.AttentionConfig("BAM-WC", weibull_k=2.0), layers=[0])
    first = ba.uncertainty(model, inputs)
    (name,) = first.by_layer
    assert torch.allclose(first.by_layer[name], plain.by_layer[name])
    with pytest.raises(ValueError, match="config is given, but the model is already Bayesian"):
        ba.uncertainty(model, inputs, config=TINY)


def test_a_model_built_from_our_layers():
    torch.manual_seed(0)
    config = ba.AttentionConfig("BAM-WC")

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = ba.nn.AdditiveAttention(5, 8, 6, config=config)
            self.mix = ba.nn.MultiheadAttention(8, 2, config=config, batch_first=True)
            self.head = nn.Linear(8, CLASSES)

        def forward(self, query, key):
            key = key + self.mix(key, key, key)[0]  # torch's default: with weights
            return self.head(self.attend(query, key)[0].mean(1))

    model, inputs = Reader().double().eval(), [torch.randn(B, 2, 5).double(), torch.randn(B, N, 8).double()]
    for module in model.modules():
        if hasattr(module, "config"):
            module.config = TINY
    exact = ba.uncertainty(model, inputs)
    assert set(exact.by_layer) == {"attend.weights", "mix"}
    drawn = ba.uncertainty(model, inputs, method="draws", num_samples=300)
    assert ((drawn.std / exact.std).square() - 1.0).abs().max() < 5.0 * math.sqrt(2.0 / 299)


def test_windows_belong_to_their_example():
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 4}
    model = hf.SwinForImageClassification(hf.SwinConfig(**sizes, num_labels=CLASSES, initializer_range=0.5)).double().eval()
    pixels = torch.randn(B, 3, 16, 16, dtype=torch.float64)
    whole = ba.uncertainty(model, {"pixel_values": pixels})
    alone = ba.uncertainty(model, {"pixel_values": pixels[1:2]})
    assert torch.allclose(whole.std[1:2], alone.std, rtol=1e-8)
    assert whole.by_token is None


@pytest.mark.parametrize("mode", ["train", "no_grad", "frozen", "gradients"])
def test_whatever_state_the_model_is_in_it_stays_there(mode):
    model, inputs = build("bert-sdpa")
    expected = ba.uncertainty(model, inputs)
    if mode == "train":
        model.train()
        model.bert.embeddings.eval()
    if mode == "frozen":
        model.bert.requires_grad_(False)
    if mode == "gradients":
        model(**inputs).logits.sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    before, generator = snapshot(model), torch.get_rng_state()
    with torch.no_grad() if mode == "no_grad" else torch.enable_grad():
        result = ba.uncertainty(model, inputs)
    assert torch.equal(result.std, expected.std)
    assert not result.std.requires_grad
    assert_unchanged(model, before)
    assert torch.equal(generator, torch.get_rng_state())
    after = [None if p.grad is None else p.grad for p in model.parameters()]
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(gradients, after, strict=True))


def test_the_model_stays_as_it_was_when_something_fails():
    model, inputs = build("bert-sdpa")
    model.train()
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError):
        ba.uncertainty(model, inputs, target=lambda outputs: 1 / 0)
    assert_unchanged(model, before)


def test_targets():
    model, inputs = build("bert-sdpa")
    second = ba.uncertainty(model, inputs, target=1)
    each = ba.uncertainty(model, inputs, target=torch.tensor([1, 1, 1]))
    own = ba.uncertainty(model, inputs, target=lambda outputs: outputs.logits[:, 1])
    assert torch.equal(second.std, each.std)
    assert torch.equal(second.std, own.std)
    assert torch.equal(second.score, second.std)
    assert own.probabilities is None
    margin = ba.uncertainty(model, inputs)
    pair = margin.probabilities.topk(2).indices
    difference = ba.uncertainty(
        model, inputs, target=lambda o: (o.logits.gather(1, pair) * torch.tensor([1.0, -1.0])).sum(1)
    )
    assert torch.allclose(difference.std, margin.std)


def test_regression():
    import transformers as hf

    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**{**SMALL, "num_labels": 1})).eval()
    inputs = tokens()
    result = ba.uncertainty(model, inputs, target="value")
    assert torch.equal(result.value, model(**inputs).logits.detach().flatten())
    assert result.label is None
    with pytest.raises(ValueError, match="one class"):
        ba.uncertainty(model, inputs)


def test_spans():
    import transformers as hf

    torch.manual_seed(0)
    model = hf.BertForQuestionAnswering(hf.BertConfig(**{**SMALL, "num_labels": 2})).double().eval()
    inputs = tokens()
    result = ba.uncertainty(model, inputs, target="span")
    with torch.no_grad():
        outputs = model(**inputs)
    for i in range(B):
        length = int(inputs["attention_mask"][i].sum())
        ends = [(s, e) for s in range(length) for e in range(s, length)]
        spans = {(s, e): float(outputs.start_logits[i, s] + outputs.end_logits[i, e]) for s, e in ends}
        (best, first), (_, second) = sorted(spans.items(), key=lambda item: -item[1])[:2]
        assert tuple(result.label[i].tolist()) == best
        assert math.isclose(float(result.margin[i]), first - second, rel_tol=1e-9)
    assert (result.std > 0).all()


def test_bfloat16_agrees_with_float32():
    model, inputs = build("bert-sdpa")
    exact = ba.uncertainty(model.float(), inputs)
    rounded = ba.uncertainty(model.bfloat16(), inputs)
    assert rounded.std.dtype == torch.float32
    assert torch.allclose(rounded.std, exact.std, rtol=0.2)


def _nan(model):
    with torch.no_grad():
        model.classifier.bias[0] = torch.nan


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "closed"}, "method must be one of 'closed-form', 'draws', 'linearized', got 'closed'"),
        ({"num_samples": 1}, "num_samples must be an integer of at least 2, got 1"),
        ({"target": "margins"}, "target must be 'margin', .*, got 'margins'"),
        ({"target": 3}, "target must be a class from 0 to 2, got 3"),
        ({"target": torch.tensor([0, 1])}, "a tensor of 3 integers"),
        ({"target": "value"}, "target='value' needs one output per example, got"),
        ({"target": "span"}, "no start_logits"),
        ({"target": lambda o: o.logits}, r"target must return one .* number per example, got shape \(3, 3\)"),
        ({"target": lambda o: o.logits[:, 0].detach()}, "does not depend on the attention"),
        ({"target": lambda o: o.logits[:, 0] / 0.0}, "NaN or infinity"),
        ({"config": ba.AttentionConfig("soft")}, "no noise"),
    ],
)
def test_bad_arguments_are_refused_by_name(options, match, monkeypatch):
    no_type_checks(monkeypatch)
    model, inputs = build("bert-sdpa")
    before = snapshot(model)
    with pytest.raises(ValueError, match=match):
        ba.uncertainty(model, inputs, **options)
    assert_unchanged(model, before)


def test_bad_models_and_batches_are_refused_by_name(monkeypatch):
    no_type_checks(monkeypatch)
    model, inputs = build("bert-sdpa")
    with pytest.raises(ValueError, match="no attention was found"):
        ba.uncertainty(nn.Linear(3, 2), torch.randn(4, 3))
    with pytest.raises(ValueError, match=r"model must be a torch.nn.Module, got str"):
        ba.uncertainty("bert", inputs)
    with ba.observe(model), pytest.raises(ValueError, match=r"outside `with ba\.observe"):
        ba.uncertainty(model, inputs)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        ba.uncertainty(model, inputs)
    with pytest.raises(ValueError, match="at least one example"):
        ba.uncertainty(model, {name: value[:0] for name, value in inputs.items()})
    ba.bayesianize(model, TINY)
    with ba.sampling(model), pytest.raises(ValueError, match="is being sampled"):
        ba.uncertainty(model, inputs)
    ba.restore(model)
    _nan(model)
    with pytest.raises(ValueError, match="NaN or infinity"):
        ba.uncertainty(model, inputs)


def test_token_logits_need_a_target_of_ones_own():
    import transformers as hf

    model = hf.BertForTokenClassification(hf.BertConfig(**SMALL)).eval()
    with pytest.raises(ValueError, match="for tokens"):
        ba.uncertainty(model, tokens())
    assert ba.uncertainty(model, tokens(), target=lambda o: o.logits[:, 2, 0]).std.shape == (B,)


def test_covariance_of_the_top_classes_and_averaged_probabilities():
    import transformers as hf

    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**{**SMALL, "num_labels": 5})).double().eval()
    inputs, noise = tokens(), ba.AttentionConfig("BAM-NOKL", weibull_k=30.0)
    result = ba.uncertainty(model, inputs, num_classes=4, config=noise)
    assert torch.equal(result.classes, result.probabilities.topk(4).indices)
    assert torch.allclose(result.covariance[:, 0, 0], result.std.square())
    ba.bayesianize(model, noise)
    drawn = ba.predict(model, inputs, 1500, batch_dims=0).logits
    top = drawn.gather(2, result.classes.expand(1500, -1, -1))
    moved = top[..., :1] - top[..., 1:]
    for example in range(B):
        sampled = torch.cov(moved[:, example].T)
        deviation = result.covariance[example].diagonal().sqrt()
        assert ((sampled - result.covariance[example]) / torch.outer(deviation, deviation)).abs().max() < 0.25
    assert torch.allclose(result.averaged_probabilities.sum(-1), torch.ones(B).double())


def test_averaged_probabilities_are_the_mean_over_normal_logits():
    from bayesattn.doubt.predictive import averaged_probabilities

    logits = torch.tensor([[2.0, 1.2, 0.9, 0.1, -1.0]]).double()
    root = 0.7 * torch.randn(3, 3).double()
    covariance = root @ root.T
    differences = logits[:, :1] - logits[:, 1:4]
    found = averaged_probabilities(logits.softmax(-1), torch.arange(4)[None], differences, covariance[None])
    draws = 200_000
    moved = differences + torch.randn(draws, 3).double() @ root.T
    shares = torch.nn.functional.pad(-moved, (1, 0)).softmax(-1)
    together = float(logits.softmax(-1)[0, :4].sum())
    error = together * shares.std(0) / math.sqrt(draws)
    assert ((found[0, :4] - together * shares.mean(0)).abs() < 5.0 * error).all()
    assert found[0, 4] == logits.softmax(-1)[0, 4]


def test_averaged_probabilities_of_two_classes_are_a_normal_integral():
    from scipy import integrate

    from bayesattn.doubt.predictive import averaged_probabilities

    d, variance = torch.tensor([0.3, 2.0]), torch.tensor([4.0, 0.01])
    p = torch.sigmoid(d)
    found = averaged_probabilities(
        torch.stack([1 - p, p], 1), torch.tensor([[1, 0], [1, 0]]), d[:, None], variance[:, None, None]
    )
    for row in range(2):
        mean, std = float(d[row]), float(variance[row]) ** 0.5
        expected = integrate.quad(lambda x, m=mean, s=std: stats.norm.pdf(x, m, s) / (1 + math.exp(-x)), -20, 20)[0]
        assert math.isclose(float(found[row, 1]), expected, rel_tol=1e-5)


@pytest.mark.parametrize("count", [1, 6])
def test_a_wrong_number_of_classes_is_refused(count):
    model, inputs = build("bert-sdpa")
    with pytest.raises(ValueError, match=f"num_classes must be .*, got {count}"):
        ba.uncertainty(model, inputs, num_classes=count)


class Siamese(nn.Module):
    """Two texts of a pair in one batch: entry i and entry i + B belong to example i."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, first, second):
        one, two = self.encoder(torch.cat([first, second])).pooler_output.chunk(2)
        return (one * two).sum(dim=1, keepdim=True) * torch.tensor([1.0, -1.0])


def test_entries_of_which_the_example_is_unknown_are_refused():
    bert, inputs = build("bert-sdpa")
    model, ids = Siamese(bert.bert.float()), inputs["input_ids"]
    with pytest.raises(ValueError, match=r"batch of 6, but the target has 3 numbers.*one example at a time"):
        ba.uncertainty(model, (ids, ids.flip(0)))


def test_choices_of_a_question_belong_to_it():
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = hf.BertForMultipleChoice(hf.BertConfig(**SMALL)).double().eval()
    ids = torch.randint(1, 61, (B, 5, N))
    whole = ba.uncertainty(model, {"input_ids": ids})
    for i in range(B):
        alone = ba.uncertainty(model, {"input_ids": ids[i : i + 1]})
        assert torch.allclose(whole.std[i], alone.std[0], rtol=1e-8)


def test_quantized_layers_that_pass_no_gradient_are_refused():
    model, inputs = build("bert-sdpa")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's dynamic quantization is deprecated, and still in use
        quantized = torch.ao.quantization.quantize_dynamic(model.float(), {nn.Linear})
        with pytest.raises(ValueError, match=r"no gradient of the target arrived.*quantized layers.*float32"):
            ba.uncertainty(quantized, inputs)


@pytest.mark.compile
# torch's compiler reads deprecated and unset attributes, and warns of both
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(BUILD))
def test_a_compiled_model_gets_the_same_doubt(name):
    model, inputs = build(name)
    expected = ba.uncertainty(model, inputs)
    torch._dynamo.reset()
    model.compile(backend="aot_eager")
    logits_of(model, inputs)
    for _ in range(2):
        found = ba.uncertainty(model, inputs)
        torch.testing.assert_close(found.std, expected.std, rtol=1e-8, atol=0.0)
        assert found.by_layer.keys() == expected.by_layer.keys()
        for layer, truth in expected.by_layer.items():
            torch.testing.assert_close(found.by_layer[layer], truth, rtol=1e-8, atol=1e-14)
    torch._dynamo.reset()


def test_one_key_leaves_nothing_to_doubt():
    model, inputs = build("bert-sdpa")
    result = ba.uncertainty(model, {name: value[:, :1] for name, value in inputs.items()})
    assert (result.std == 0).all()
    assert torch.isinf(result.t).all()
    correct = torch.tensor([True, False, True])
    assert 0.0 <= float(ba.metrics.aurc(-result.score, correct.double())) <= 1.0


def test_labels_in_the_batch_are_not_given_to_the_model():
    model, inputs = build("bert-sdpa")
    expected = ba.uncertainty(model, inputs)
    for labels in (torch.full((B,), 7), torch.ones(B), [0, 1, 2]):
        found = ba.uncertainty(model, {**inputs, "labels": labels})
        assert torch.equal(found.std, expected.std)


def test_spans_are_not_in_the_padding():
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = hf.BertForQuestionAnswering(hf.BertConfig(**{**SMALL, "num_labels": 2})).double().eval()
    ids, mask = torch.randint(1, 61, (B, N)), torch.ones(B, N, dtype=torch.long)
    alone = ba.uncertainty(model, {"input_ids": ids, "attention_mask": mask}, target="span")
    padded = {"input_ids": nn.functional.pad(ids, (0, 4)), "attention_mask": nn.functional.pad(mask, (0, 4))}
    for method in ("closed-form", "draws"):
        assert torch.equal(ba.uncertainty(model, padded, target="span", method=method).label, alone.label)
    assert torch.allclose(ba.uncertainty(model, padded, target="span").std, alone.std, rtol=1e-8)


def test_models_with_several_labels_per_example_have_no_margin():
    model, inputs = build("bert-sdpa")
    model.config.problem_type = "multi_label_classification"
    with pytest.raises(ValueError, match=r"multi_label_classification.*Give target= a class"):
        ba.uncertainty(model, inputs)
    assert (ba.uncertainty(model, inputs, target=1).std > 0).all()


@pytest.mark.parametrize("inputs", [["a good film", "a bad film"], {"input_ids": [[1, 2], [3, 4]]}])
def test_texts_that_are_not_tokenized_are_refused(inputs):
    model, _ = build("bert-sdpa")
    with pytest.raises(ValueError, match='return_tensors="pt"'):
        ba.uncertainty(model, inputs)
