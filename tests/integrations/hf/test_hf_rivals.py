"""Other people's models with a rival in the place of their softmax: by one call, in training, saved, and undone."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv
from zoo import ARCHITECTURES, BATCH, build

import bayesattn as ba
from bayesattn.convert import bayesianize, conversion_report, load_bayesian, restore, save_bayesian
from bayesattn.integrations.hf import generate
from bayesattn.integrations.pyg import BayesianGATConv, neighbor_batch
from bayesattn_recipes.baselines import AttentionChoice, attention_options, with_score_function
from bayesattn_recipes.baselines.trainer import ScoreFunctionTrainer
from helpers import assert_finite, assert_within_standard_errors

IN_LAYERS = ("hard-reinforce", "hard-gumbel", "gaussian-context", "gaussian-weights", "mc-dropout", "sampled-kl")
GRAPH = torch.tensor([[0, 1, 2, 3, 4, 4, 2], [1, 2, 3, 4, 0, 1, 0]])
LAYERS = {"gat": GATConv, "gatv2": GATv2Conv, "transformer": TransformerConv}


def choice(name, **options) -> AttentionChoice:
    return AttentionChoice("BAM-WC", sampled_kl=True) if name == "sampled-kl" else AttentionChoice(name, **options)


class Caller(nn.Module):
    """Code of one's own around torch's function, two query heads per key head."""

    def __init__(self):
        super().__init__()
        self.head_dim, self.num_heads, self.num_kv_heads = 5, 4, 2
        self.query, self.key, self.value = nn.Linear(6, 20), nn.Linear(6, 10), nn.Linear(6, 10)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, 5)).transpose(-3, -2) for p in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


def torch_model():
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 3, 16, 0.1, batch_first=True), 2, enable_nested_tensor=False)


def own_model():
    torch.manual_seed(0)
    return nn.Sequential(Caller(), nn.Linear(20, 6))


MODELS = {
    "torch": (torch_model, lambda: {"src": torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))}),
    "own": (own_model, lambda: {"input": torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))}),
    **{
        name: (lambda name=name: build(name, "sdpa"), lambda name=name: ARCHITECTURES[name].inputs(False))
        for name in ("bert", "albert", "swin", "llama")
    },
}


def outputs(model, inputs):
    found = model(**inputs)
    return found if isinstance(found, torch.Tensor) else found.logits


@pytest.mark.parametrize("variant", IN_LAYERS)
@pytest.mark.parametrize("name", MODELS)
def test_one_call_puts_a_rival_into_any_model_and_restore_takes_it_out(name, variant):
    make, feed = MODELS[name]
    model, inputs = make().eval(), feed()
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        before = outputs(model, inputs)
        bayesianize(model, **attention_options(choice(variant)))
        if variant != "gaussian-weights":
            assert torch.equal(outputs(model, inputs), before)
        with ba.sampling(model, dropout=variant == "mc-dropout"):
            assert not torch.equal(outputs(model, inputs), before)
        restore(model)
        assert torch.equal(outputs(model, inputs), before)
    assert state.keys() == model.state_dict().keys()
    assert not any("bayes" in name for name, _ in model.named_modules())


@pytest.mark.parametrize("variant", IN_LAYERS)
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_reaches_every_parameter_of_any_model(name, variant):
    make, feed = MODELS[name]
    plain, model, inputs = make().train(), bayesianize(make().train(), **attention_options(choice(variant))), feed()
    losses = lambda net: (outputs(net, inputs) - 0.3).square().flatten(1).mean(dim=1)  # noqa: E731
    losses(plain).sum().backward()
    expected = {name for name, p in plain.named_parameters() if p.grad is not None}
    with ba.record_kl() as kl:
        nll = with_score_function(model, lambda: losses(model)).sum()
    (nll + kl.total()).backward()
    assert (len(kl) > 0) == choice(variant).has_kl
    found = {name: p.grad for name, p in model.named_parameters()}
    assert {name for name in found if found[name] is not None and "bayes" not in name} == expected
    assert all(grad is not None for name, grad in found.items() if "bayes" in name)
    assert_finite(*(grad for grad in found.values() if grad is not None))


def test_sampled_kl_of_shared_keys_with_a_prior_for_each_estimates_the_closed_form():
    options = {"prior_per_head": True, "weibull_k": 3.0}
    sampled, closed = (
        bayesianize(Caller(), **attention_options(AttentionChoice("BAM-WC", sampled_kl=is_sampled, **options)))
        for is_sampled in (True, False)
    )
    names = {name: name.replace("bayes_weights.weights.", "") for name in sampled.state_dict() if "settings" not in name}
    state = sampled.state_dict()
    closed.load_state_dict({other: state[name] for name, other in names.items()})
    x, found = torch.randn(1, 5, 6).expand(3001, 5, 6), []
    for model in (sampled, closed):
        with torch.no_grad(), ba.record_kl() as kl:
            model.train()(x)
        found.append(kl.per_call()[0][1])
    assert_within_standard_errors(found[0], float(found[1][0]), "grouped")


@pytest.mark.parametrize("variant", ["hard-reinforce", "gaussian-context", "sampled-kl"])
def test_what_a_rival_added_is_saved_and_loaded(variant, tmp_path):
    model = bayesianize(build("bert", "sdpa"), **attention_options(choice(variant)))
    with torch.no_grad():
        for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if "averag" in n)]:
            tensor.add_(0.01)
    save_bayesian(model, tmp_path / "own")
    model.save_pretrained(tmp_path / "host")
    for folder in ("own", "host"):
        fresh = load_bayesian(build("bert", "sdpa"), tmp_path / folder, **attention_options(choice(variant)))
        added = {name: value for name, value in model.state_dict().items() if ".bayes." in name}
        loaded = fresh.state_dict()
        assert len(added) > 2
        assert all(torch.equal(value, loaded[name]) for name, value in added.items())
        assert conversion_report(fresh).added_parameters == conversion_report(model).added_parameters
    with pytest.raises(RuntimeError, match=r"the checkpoint's attention is \{'weights'"):
        bayesianize(build("bert", "sdpa"), **attention_options(AttentionChoice("hard-gumbel"))).load_state_dict(
            model.state_dict(), strict=False
        )


def test_checkpoints_of_plain_configs_load_into_choices_and_back():
    plain, chosen = (
        bayesianize(build("bert", "sdpa"), **attention_options(kind("BAM-WC")))
        for kind in (ba.AttentionConfig, AttentionChoice)
    )
    chosen.load_state_dict(plain.state_dict())
    plain.load_state_dict(chosen.state_dict())


def test_windows_of_an_image_are_charged_with_the_loss_of_their_image():
    model = bayesianize(
        build("swin", "sdpa").train(), **attention_options(AttentionChoice("hard-reinforce", baseline="none"))
    )
    inputs = ARCHITECTURES["swin"].inputs(False)
    first = model.swin.encoder.layers[0].blocks[0].attention
    noted = []
    weights = next(m for m in first.modules() if hasattr(m, "choices"))
    choose = weights._choose
    weights._choose = lambda choice: (choose(choice), noted.append(weights.choices[-1].log_prob))
    # only the second image has a loss
    which = torch.arange(BATCH) == 1
    losses = with_score_function(model, lambda: model(**inputs).logits.square().sum(dim=1) * which)
    (grad,) = torch.autograd.grad(losses.sum(), noted[0])
    windows = len(noted[0]) // BATCH
    assert windows > 1
    assert not grad[:windows].any()
    assert torch.allclose(grad[windows:], losses[1].detach().expand_as(grad[windows:]))


def test_the_trainer_trains_hard_attention(tmp_path):
    model = bayesianize(
        build("bert", "sdpa"), **attention_options(AttentionChoice("hard-reinforce", baseline="self-critical"))
    )
    rows = [{"input_ids": torch.randint(3, 61, (6,)), "labels": torch.tensor(i % 2)} for i in range(8)]
    arguments = hf.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", max_steps=2,
        per_device_train_batch_size=4, dataloader_pin_memory=False,
    )  # fmt: skip
    before = model.bert.encoder.layer[0].attention.self.query.weight.detach().clone()
    ScoreFunctionTrainer(model, arguments, train_dataset=rows).train()
    assert not torch.equal(model.bert.encoder.layer[0].attention.self.query.weight, before)


@pytest.mark.parametrize("variant", [v for v in IN_LAYERS if v != "sampled-kl"])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_of_a_graph_take_rivals(kind, variant):
    torch.manual_seed(3)
    model = LAYERS[kind](4, 5, heads=2, dropout=0.1).eval()
    x = torch.randn(5, 4)
    before = model(x, GRAPH)
    bayesianize(model, **attention_options(AttentionChoice(variant)))
    if variant != "gaussian-weights":
        assert torch.equal(model(x, GRAPH), before)
    model.train()
    with ba.record_kl() as kl:
        loss = with_score_function(model, lambda: (model(x, GRAPH) - 1.0).square().sum().view(1)).sum()
    (loss + kl.total()).backward()
    assert_finite(*(parameter.grad for parameter in model.parameters()))
    restore(model.eval())
    assert torch.equal(model(x, GRAPH), before)


@pytest.mark.parametrize("variant", ["hard-gumbel", "hard-reinforce", "mc-dropout"])
def test_rivals_run_where_pyg_passes_the_messages(variant):
    model = bayesianize(GATConv(4, 5, heads=2, aggr="mean"), **attention_options(AttentionChoice(variant)))
    x = torch.randn(5, 4)
    with_score_function(model, lambda: model(x, GRAPH).square().sum().view(1)).sum().backward()
    assert_finite(*(parameter.grad for parameter in model.parameters()))


# refusals


@pytest.mark.parametrize("variant", ["variational-exact", "variational-enum", "variational-sample", "variational-dirichlet"])
def test_latent_alignments_are_refused_before_anything_changes(variant):
    model = build("bert", "sdpa")
    before = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(ValueError, match=f"variant '{variant}' needs the likelihood"):
        bayesianize(model, **attention_options(AttentionChoice(variant)))
    assert [(name, type(module)) for name, module in model.named_modules()] == before


def test_the_sampled_kl_is_refused_for_the_layers_of_a_graph_before_anything_changes():
    model = GATConv(4, 5)
    with pytest.raises(ValueError, match=r"GATConv\) cannot be converted: BAM-WC does not run on edges"):
        bayesianize(model, **attention_options(choice("sampled-kl")))
    assert type(model) is GATConv


@pytest.mark.parametrize("backend", ["triton", "csr"])
def test_a_backend_asked_for_by_name_is_refused(backend):
    with pytest.raises(
        ValueError, match=f"backend '{backend}' cannot be used with hard-gumbel, which has no kernel. Use 'auto' or"
    ):
        BayesianGATConv(4, 5, **attention_options(AttentionChoice("hard-gumbel")), backend=backend)
    layer = bayesianize(GATConv(4, 5), **attention_options(AttentionChoice("hard-gumbel")))
    layer.backend = backend
    with pytest.raises(ValueError, match=f"backend '{backend}' cannot be used with hard-gumbel"):
        layer(torch.randn(5, 4), GRAPH)


def test_losses_of_nodes_are_refused_because_choices_are_shared():
    model = bayesianize(GATConv(4, 5), **attention_options(AttentionChoice("hard-reinforce")))
    with pytest.raises(ValueError, match=r"groups of equal size\), got losses of shape \(5,\) for 1 examples"):
        with_score_function(model, lambda: model(torch.randn(5, 4), GRAPH).square().sum(dim=1))


def test_noise_on_sums_is_refused_where_pyg_makes_them_or_sees_a_part_of_the_graph():
    model = bayesianize(GATConv(4, 5, aggr="mean"), **attention_options(AttentionChoice("gaussian-context")))
    with pytest.raises(ValueError, match="the KL of the weights 'gaussian-context' needs sums"):
        model(torch.randn(5, 4), GRAPH)
    with pytest.raises(ValueError, match="weights must have no KL in batches, got 'gaussian-context'"):  # noqa: SIM117
        with neighbor_batch(model, batch_size=2, num_nodes=5):
            pass


def test_generation_with_a_noise_seed_is_refused():
    model = bayesianize(build("llama", "sdpa"), **attention_options(AttentionChoice("hard-gumbel")))
    with pytest.raises(ValueError, match="weights are 'hard-gumbel', whose noise is not tied to a sequence; generation"):
        generate(model, {"input_ids": torch.tensor([[3, 4]])}, num_samples=2, seed=0, max_new_tokens=2)


def test_values_of_another_width_than_keys_are_refused_by_name():
    model = bayesianize(Caller(), **attention_options(AttentionChoice("gaussian-context")))
    model.value = nn.Linear(6, 6)
    x = torch.randn(2, 3, 6)
    q, k, v = model.query(x).view(2, 3, 4, 5), model.key(x).view(2, 3, 2, 5), model.value(x).view(2, 3, 2, 3)
    options = {"mask": None, "bias": None, "is_causal": False, "scale": 1.0, "dropout_p": 0.0}
    with pytest.raises(ValueError, match=r"the context must have 5 features, .* gaussian-context .*, got 3"):
        model.bayes.attend(*(y.transpose(1, 2) for y in (q, k, v)), **options)


def test_files_with_custom_weights_need_what_built_them(tmp_path):
    options = {
        name: attention_options(AttentionChoice("hard-gumbel", temperature=t)) for name, t in (("a", 0.5), ("b", 0.7))
    }
    save_bayesian(bayesianize(build("bert", "sdpa"), **options["a"]), tmp_path / "custom")
    save_bayesian(bayesianize(build("bert", "sdpa"), ba.AttentionConfig("BAM-WC")), tmp_path / "plain")
    model = build("bert", "sdpa")
    with pytest.raises(
        ValueError, match=r"saved with custom weights .*'hard-gumbel'.*load_bayesian\(model, folder, weights="
    ):
        load_bayesian(model, tmp_path / "custom")
    with pytest.raises(ValueError, match=r"has the custom weights .*0.7.* in the model and .*0.5.* in the file"):
        load_bayesian(model, tmp_path / "custom", **options["b"])
    with pytest.raises(ValueError, match=r"weights is given, but .* was saved with a config"):
        load_bayesian(model, tmp_path / "plain", **options["a"])
    assert not conversion_report(model).converted
    assert conversion_report(load_bayesian(model, tmp_path / "custom", **options["a"])).rows[0].variant == "hard-gumbel"
