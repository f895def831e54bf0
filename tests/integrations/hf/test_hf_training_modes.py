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


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "gptj", "bloom"])
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


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "deberta_v2", "bloom"])
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


def mean_gradients(model, inputs, *, of_kl: bool, autocast: bool) -> dict[str, torch.Tensor]:
    """Gradients of the KL, or of a plain loss, in eval mode: nothing is random, so precisions can be compared."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), ba.record_kl() as kl:
        output = run(model, inputs)
    loss = kl.total() if of_kl else output.to(torch.promote_types(output.dtype, torch.float32)).square().mean()
    loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def relative_error(low: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], names: list[str]) -> float:
    difference, size = (
        torch.cat([x.flatten() for x in xs]) for xs in ([low[n] - exact[n] for n in names], [exact[n] for n in names])
    )
    return float(difference.norm() / size.norm())


@pytest.mark.parametrize("mode", ["autocast", "weights"])
@pytest.mark.parametrize("variant", ["BAM-WC", "BAM-LC"])
@pytest.mark.parametrize("preset", ["paper", "default"])
@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_the_kl_s_gradient_in_bfloat16_is_as_exact_as_a_plain_loss_s(name, preset, variant, mode):
    """Against float64 on the same (rounded) weights: at most twice the error that bfloat16 makes in a plain loss's gradient.

    Only queries, keys and what lies below them are in bfloat16, for both losses; softmax and KL are not. So the KL's
    gradient should be no worse, and twice leaves room for another direction of the same rounding errors.
    """
    model, inputs = build(name, spread=0.1), ARCHITECTURES[name].inputs(True)
    bayesianize(model, ba.AttentionConfig(variant, preset=preset))
    if mode == "weights":
        model.to(torch.bfloat16)
    low_kl, low_plain = (mean_gradients(model, inputs, of_kl=kl, autocast=mode == "autocast") for kl in (True, False))
    model.double()
    exact_kl, exact_plain = (mean_gradients(model, inputs, of_kl=kl, autocast=False) for kl in (True, False))
    priors = [key for key in exact_kl if "bayes_prior" in key]
    shared = [key for key in exact_kl if key in exact_plain and key not in priors and exact_kl[key].abs().max() > 0]
    assert priors
    assert shared
    limit = 2.0 * relative_error(low_plain, exact_plain, shared)
    assert relative_error(low_kl, exact_kl, shared) <= limit
    assert relative_error(low_kl, exact_kl, priors) <= limit


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
    gradients = []
    for total in (expected_kl, kl):
        model.zero_grad()
        total.backward()
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    assert set(gradients[0]) <= set(gradients[1])
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, rtol=1e-3, atol=1e-4, msg=key)
    model.zero_grad()
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
