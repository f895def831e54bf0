"""Under autocast to bfloat16 noise, softmax and KL stay in float32, and training works."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import bayesattn as ba
from bayesattn import elbo, record_kl
from bayesattn.ops.attention import reference

X = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(2))


def _modules(variant: str) -> list[tuple[nn.Module, object]]:
    config = ba.AttentionConfig(variant)
    layer = ba.nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True, config=config)
    return [
        (ba.nn.MultiheadAttention(12, 2, batch_first=True, config=config), lambda m: m(X, X, X, need_weights=False)[0]),
        (ba.nn.MultiheadAttention(12, 2, batch_first=True, config=config), lambda m: m(X, X, X)[0]),
        (layer, lambda m: m(X)),
        (ba.nn.AdditiveAttention(12, 12, 5, config=config), lambda m: m(X, X)[0]),
        (ba.nn.BayesianWeights(config, key_dim=12), lambda m: m((X @ X.mT) / 12, X)),
    ]


@pytest.mark.parametrize("variant", ["BAM-WC", "BAM-LC", "BAM-WF"])
@pytest.mark.parametrize("train", [True, False])
def test_the_kl_is_float32_and_near_the_one_without_autocast(variant, train):
    for module, call in _modules(variant):
        module.train(train)
        with record_kl() as plain:
            call(module)
        with torch.autocast("cpu", dtype=torch.bfloat16), record_kl() as cast:
            call(module)
        (_, expected), (_, value) = plain.per_call()[0], cast.per_call()[0]
        assert value.dtype == torch.float32
        # the projections are bfloat16, with 8 bits: 2^-8 of scores and prior logits of size 3, through a KL of size 10
        torch.testing.assert_close(value, expected, rtol=2e-2, atol=2e-2)
        assert cast.total().dtype == torch.float32


def test_the_noise_is_added_in_float32(monkeypatch):
    """At k = 1000 the log-noise has deviation 1.3e-3; in bfloat16, with spacing 8e-3 near 1, it would vanish."""
    seen = []
    original = reference.sample_weights

    def watch(scores, *args, **kwargs):
        seen.append(scores.dtype)
        return original(scores, *args, **kwargs)

    monkeypatch.setattr(reference, "sample_weights", watch)
    module = ba.nn.MultiheadAttention(12, 2, batch_first=True, config=ba.AttentionConfig("BAM-NOKL", weibull_k=1000.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module(X, X, X)
        module(X, X, X, need_weights=False)
    assert seen == [torch.float32, torch.float32]


@pytest.mark.parametrize("preset", ["paper", "official-code", "default"])
def test_a_training_step_under_autocast_gives_finite_gradients_near_those_without(preset):
    config = ba.AttentionConfig("BAM-WC", preset=preset, weibull_k=1e6)
    model = ba.nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True, config=config)

    def gradients(enabled: bool) -> torch.Tensor:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            with record_kl() as kl:
                output = model(X)
            loss = elbo(output.float().square().mean(), kl.total(), kl_weight=0.1).loss
        assert loss.dtype == torch.float32
        loss.backward()
        assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in model.parameters())
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    exact, cast = gradients(False), gradients(True)
    assert bool(cast.isfinite().all())
    # bfloat16 activations: a few times 2^-8 in the direction of the gradient
    assert float(torch.cosine_similarity(exact, cast, dim=0)) > 0.99


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_gradient_scaler_scales_the_kl_with_the_loss(checkpointed):
    """float16 autocast, loss × 2^10, backward, unscale: the gradient of NLL + KL, also where a checkpoint carries the KL."""
    model = ba.nn.TransformerEncoderLayer(
        12, 2, 16, dropout=0.0, batch_first=True, config=ba.AttentionConfig("BAM-WC", weibull_k=1e6)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def gradients(half: bool) -> torch.Tensor:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=half)
        optimizer.zero_grad()
        x = X.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.float16, enabled=half), record_kl() as kl:
            output = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True) if checkpointed else model(x)
        loss = elbo(output.float().square().mean(), kl.total(), kl_weight=0.1).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    exact, scaled = gradients(False), gradients(True)
    # 11 bits in the projections and their gradients
    assert float((scaled - exact).norm() / exact.norm()) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_whole_models_in_half_precision_record_a_float32_kl(dtype):
    module = ba.nn.MultiheadAttention(12, 2, batch_first=True, config=ba.AttentionConfig("BAM-WC"), dtype=dtype)
    x = X.to(dtype)
    with record_kl() as kl:
        output, _ = module(x, x, x, need_weights=False)
    total = kl.total()
    assert (output.dtype, total.dtype) == (dtype, torch.float32)
    (output.float().mean() + 1e-2 * total).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in module.parameters())


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_queries_and_keys_that_rotary_embeddings_left_in_float32_are_cast_as_torch_s_attention_does(backend):
    query, key, value = (torch.randn(2, heads, 7, 8) for heads in (4, 2, 2))
    options = {"config": ba.AttentionConfig("BAM-WF"), "seed": 3, "backend": backend, "is_causal": True}
    low = [x.bfloat16() for x in (query, key, value)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ba.functional.attention(query, key, low[2], **options)
        expected = ba.functional.attention(*low, **options)
    assert found[0].dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    with pytest.raises(ValueError, match="must have the same dtype, got"):
        ba.functional.attention(query, key, low[2], **options)


@pytest.mark.parametrize("variant", ["BAM-WC", "BAM-LC", "BAM-NOKL"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_converted_language_model_with_rotary_embeddings_trains_under_autocast(variant, is_padded):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=50, max_position_embeddings=16)
    model = ba.bayesianize(transformers.LlamaForCausalLM(config), ba.AttentionConfig(variant)).train()
    ids = torch.randint(0, 50, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, 6:] = 1 - int(is_padded)
    with torch.autocast("cpu", dtype=torch.bfloat16), record_kl(model) as kl:
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
    (loss + kl.total()).backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)
