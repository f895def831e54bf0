"""The KL and its gradient under checkpointing, bfloat16, compilation and two processes."""

import os

import pytest
import torch
import torch.distributed as dist
from zoo import ARCHITECTURES, build, run

import bayesattn as ba
from bayesattn.convert import bayesianize
from processes import leave, run_on_two

CONFIG = ba.AttentionConfig("BAM-WC")


def gradients(model, inputs, seed=5):
    model.zero_grad()
    torch.manual_seed(seed)
    with ba.record_kl() as kl:
        loss = run(model, inputs).square().mean()
    (loss + 0.5 * kl.total()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpointing_gives_the_same_gradients(name, use_reentrant):
    model, inputs = bayesianize(build(name), CONFIG).train(), ARCHITECTURES[name].inputs(True)
    for module in model.modules():
        # dropout masks of a recomputation are the checkpoint's business; here only the attention noise is replayed
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    expected = gradients(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    actual = gradients(model, inputs)
    assert set(actual) == set(expected)
    for key, gradient in expected.items():
        torch.testing.assert_close(actual[key], gradient, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_bfloat16_weights_and_autocast_keep_the_kl_in_float32(name):
    model, inputs = bayesianize(build(name), CONFIG), ARCHITECTURES[name].inputs(True)
    with torch.no_grad(), ba.record_kl() as exact:
        run(model, inputs)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), ba.record_kl() as autocast:
        run(model, inputs)
    model.to(torch.bfloat16)
    with torch.no_grad(), ba.record_kl() as half:
        run(model, inputs)
    expected = exact.total()
    for scope in (autocast, half):
        assert all(value.dtype == torch.float32 for _, value in scope.per_call())
        # keys and queries carry 8 bits; the KL is smooth in them
        torch.testing.assert_close(scope.total(), expected, rtol=0.05, atol=0.0)


@pytest.mark.compile
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_compiles_to_one_graph_with_the_kl(name):
    model, inputs = bayesianize(build(name), CONFIG), ARCHITECTURES[name].inputs(True)
    model.config.use_cache = False

    def step(**kwargs):
        with ba.record_kl() as kl:
            out = run(model, kwargs)
        return out, kl.total()

    expected, expected_kl = step(**inputs)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    out, kl = compiled(**inputs)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kl, expected_kl, rtol=1e-4, atol=1e-4)
    model.train()
    _, kl = compiled(**inputs)
    kl.backward()
    first = next(m for m in model.modules() if hasattr(m, "bayes")).bayes.bayes_prior
    assert first.weight_in.grad.abs().max() > 0


def _process(rank: int, folder: str, kind: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = bayesianize(build("bert"), CONFIG)
    inputs = {key: value[rank : rank + 1] for key, value in ARCHITECTURES["bert"].inputs(True).items()}
    if kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for layer in model.bert.encoder.layer:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    else:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    with ba.record_kl() as kl:
        loss = wrapped(**inputs).logits.square().mean()
    # weight 0 must still give every prior a gradient, or the reduction never finishes
    (loss + 0.0 * kl.total()).backward()
    model.zero_grad()
    with ba.record_kl() as kl:
        loss = wrapped(**inputs).logits.square().mean()
    (loss + kl.total()).backward()
    grads = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.named_parameters()}
    if rank == 0:
        torch.save(grads, f"{folder}/gradients.pt")
    leave()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_give_the_gradient_of_one(kind, tmp_path):
    """In eval mode, so that nothing is random: the batch split over two processes, gradients averaged."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_on_two(_process, str(tmp_path), kind)
    model, inputs = bayesianize(build("bert"), CONFIG), ARCHITECTURES["bert"].inputs(True)
    with ba.record_kl() as kl:
        loss = run(model, inputs).square().mean()
    (loss + kl.total()).backward()
    gathered = torch.load(tmp_path / "gradients.pt")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gathered[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)
