"""Doubt of every architecture of the support matrix: the model's own numbers, and the deviation of tiny noise."""

import math
import sys
import threading

import pytest
import torch
from zoo import ARCHITECTURES, build, main_output

import bayesattn as ba

TINY = ba.AttentionConfig("BAM-NOKL", weibull_k=3000.0)
DRAWS = 100


def number(outputs):
    """One number per example; CLIP's logits compare all images with all texts, its embeddings are of one example each."""
    embeddings = [outputs[name] for name in ("text_embeds", "image_embeds") if name in outputs]
    values = torch.cat(embeddings, dim=1) if embeddings else main_output(outputs).flatten(1)
    directions = torch.randn(values.shape[1], generator=torch.Generator().manual_seed(5), dtype=values.dtype)
    return values @ directions


@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, kind) for name, architecture in ARCHITECTURES.items() for kind in architecture.implementations],
)
def test_doubt_is_the_deviation_that_tiny_noise_gives(name, implementation):
    architecture = ARCHITECTURES[name]
    model = build(name, implementation).double()
    # in float64 ModernBERT's eager mask overflows in its float32 softmax, and its own gradients of padding are NaN
    is_padded = architecture.can_pad and (name, implementation) != ("modernbert", "eager")
    inputs = architecture.inputs(is_padded)
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    with torch.no_grad():
        own = number(model(**inputs))
    exact = ba.uncertainty(model, inputs, target=number, config=TINY)
    if name == "patchtst":
        # its linear layers get strided inputs, whose products torch orders by whether the weights need gradients
        assert torch.allclose(exact.value, own, rtol=1e-13)
    else:
        assert torch.equal(exact.value, own)
    assert len(exact.by_layer) == architecture.modules
    assert torch.allclose(sum(exact.by_layer.values()), exact.std.square(), rtol=1e-10)
    drawn = ba.uncertainty(model, inputs, target=number, config=TINY, method="draws", num_samples=DRAWS)
    # a sample variance of normal numbers has a relative standard error of √(2/(M−1))
    assert ((drawn.std / exact.std).square() - 1.0).abs().max() < 5.0 * math.sqrt(2.0 / (DRAWS - 1))


def test_gradients_that_are_not_finite_are_refused():
    model = build("modernbert", "eager").double()
    with pytest.raises(ValueError, match=r"gradients of the target in the attention scores contain NaN"):
        ba.uncertainty(model, ARCHITECTURES["modernbert"].inputs(True), target=number)


def in_threads(count, call):
    """Return what `count` threads that call at the same time return or raise; they switch as often as Python can."""
    found = []

    def run():
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return found


@pytest.mark.parametrize("method", ["closed-form", "draws"])
def test_threads_that_share_a_plain_model_get_the_answers_of_one(method):
    # it is converted for a call: without a lock one thread restores it while another is in the middle of it
    model = build("bert", "sdpa")
    inputs = ARCHITECTURES["bert"].inputs(True)

    def doubts():
        return [ba.uncertainty(model, inputs, target=number, method=method, num_samples=3, seed=7).std for _ in range(9)]

    expected = doubts()
    for found in in_threads(4, doubts):
        assert not isinstance(found, Exception), found
        assert all(map(torch.equal, found, expected))
    assert not any(isinstance(module, ba.nn.BayesianModule) for module in model.modules())


def test_threads_that_share_a_bayesian_model_draw_what_one_draws():
    model = ba.bayesianize(build("bert", "sdpa"), ba.AttentionConfig("BAM-NOKL"))
    inputs = ARCHITECTURES["bert"].inputs(True)

    def draws():
        return [ba.predict(model, inputs, 3, seed=5, task="regression", output=main_output).samples for _ in range(9)]

    expected = draws()
    for found in in_threads(4, draws):
        assert not isinstance(found, Exception), found
        assert all(map(torch.equal, found, expected))
