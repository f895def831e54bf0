"""A converted model under torch.compile: eager, default mode and CUDA graphs give the same numbers for the same seed."""

import pytest
import torch
import torch._inductor.config as inductor
from kernel_device import DEVICE, MARKS, needs_gpu
from transformers import BertConfig, BertModel

import bayesattn as ba

pytestmark = [
    *MARKS,
    pytest.mark.compile,
    needs_gpu,
    # the compiler advises less precise products, and begins its CUDA graphs with an empty one
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores", "ignore:The CUDA Graph is empty"),
]
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 31,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _torch_s_own_generator():
    """Inductor has a generator of its own unless it is told to use eager's."""
    torch._dynamo.reset()
    with inductor.patch(fallback_random=True):
        yield
    torch._dynamo.reset()


def model_and_inputs(variant: str, padded: bool):
    torch.manual_seed(1)
    model = BertModel(BertConfig(**SIZES))
    ba.bayesianize(model, ba.AttentionConfig(variant, weibull_k=2.0))
    ids = torch.arange(2 * 40, device=DEVICE).reshape(2, 40) % 31
    mask = torch.ones_like(ids)
    mask[0, 30:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask} if padded else {"input_ids": ids}
    return model.to(torch.device(DEVICE)).train(), inputs


def run(model, call, seed):
    model.zero_grad()
    torch.manual_seed(seed)
    loss = call()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().clone(), **found}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("variant", ["BAM-NOKL", "BAM-WC", "BAM-LC"])
def test_compiled_steps_equal_eager_ones_and_draw_anew(variant, padded, mode):
    model, inputs = model_and_inputs(variant, padded)
    # the mean square of what a layer norm gives is 1, whatever the parameters are
    direction = torch.linspace(-1.0, 1.0, SIZES["hidden_size"], device=DEVICE).sin()

    def loss():
        with ba.record_kl() as kl:
            output = model(**inputs).last_hidden_state
        return (output * direction).square().mean() + 0.1 * kl.total()

    compiled = torch.compile(loss, fullgraph=True, mode=mode)
    for _ in range(3):
        # compiles, records, replays
        run(model, compiled, 0)
    expected, found, other = run(model, loss, 5), run(model, compiled, 5), run(model, compiled, 6)
    assert found.keys() == expected.keys()
    for name, truth in expected.items():
        # float32 with products fused differently, and dQ added in any order
        torch.testing.assert_close(found[name], truth, rtol=2e-3, atol=2e-3 * float(truth.abs().max()), msg=name)
    assert not torch.equal(other["loss"], found["loss"])
    # without a seed, every replay draws anew as well
    first, second = (float(compiled().detach()) for _ in range(2))
    assert first != second
