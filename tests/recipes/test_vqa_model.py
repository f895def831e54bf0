"""MCAN: the paper's parameter counts, one model for all variants, and masks that noise cannot destroy."""

import dataclasses

import pytest
import torch

from bayesattn import record_kl
from bayesattn.config import AttentionConfig
from bayesattn.functional import dense
from bayesattn.nn import multihead_arguments
from bayesattn.prediction import sampling
from bayesattn_recipes.common.config import build_config
from bayesattn_recipes.vqa.attend import attention_maps
from bayesattn_recipes.vqa.model import MCAN, MCANSize
from bayesattn_recipes.vqa.train import CONFIGS, learning_rate_factor, load_config
from bayesattn_recipes.vqa.vocabulary import RESERVED, Vocabulary
from helpers import CONTEXTUAL, STOCHASTIC, WITH_KL

SMALL = MCANSize(width=12, num_heads=3, num_layers=2, feedforward_dim=10, word_dim=5, reduction_dim=7, fused_dim=11)


def vocabulary(num_words: int = 17, num_answers: int = 13) -> Vocabulary:
    words = (*RESERVED, *(f"w{index}" for index in range(num_words - 2)))
    return Vocabulary(words, tuple(f"a{index}" for index in range(num_answers)), 14)


def small_model(variant: str, size: MCANSize = SMALL) -> MCAN:
    torch.manual_seed(3)
    return MCAN(AttentionConfig(variant), vocabulary(), region_dim=4, size=size)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(5)
    lengths, counts = torch.tensor([7, 2, 5]), torch.tensor([6, 4, 1])
    return {
        "words": torch.randint(1, 17, (3, 7), generator=generator) * (torch.arange(7) < lengths[:, None]),
        "word_mask": torch.arange(7) < lengths[:, None],
        "regions": torch.randn(3, 6, 4, generator=generator),
        "region_mask": torch.arange(6) < counts[:, None],
    }


def paper_parameters(variant: str, size: MCANSize | None = None) -> int:
    # the vocabulary sizes of the paper
    config = AttentionConfig(variant, prior_hidden_dim=20)
    model = MCAN(config, vocabulary(20_572, 3129), region_dim=2048, size=size)
    return sum(parameter.numel() for parameter in model.parameters())


def test_small_model_has_the_papers_number_of_parameters():
    assert paper_parameters("soft") == 57_812_491


@pytest.mark.parametrize("variant", CONTEXTUAL)
def test_contextual_prior_adds_18_networks_of_1321_parameters(variant):
    # 18 attention modules, each 64 · 20 + 20 + 20 + 1
    assert paper_parameters(variant) - paper_parameters("soft") == 18 * 1321 == 23_778


@pytest.mark.parametrize("variant", ["BAM-NOKL", "BAM-LF", "BAM-WF"])
def test_other_variants_add_no_parameter(variant):
    size = MCANSize(num_layers=1)
    assert paper_parameters(variant, size) == paper_parameters("soft", size)


@pytest.mark.parametrize("variant", STOCHASTIC)
def test_eval_mode_is_the_soft_model_bit_for_bit(variant, inputs):
    soft, bayesian = small_model("soft").eval(), small_model(variant).eval()
    bayesian.load_state_dict(soft.state_dict())
    with torch.no_grad():
        assert torch.equal(bayesian(**inputs), soft(**inputs))


@pytest.mark.parametrize("variant", WITH_KL)
def test_every_attention_map_has_one_kl_and_reductions_none(variant, inputs):
    model = small_model(variant)
    with record_kl() as kl:
        model(**inputs)
    assert len(kl) == 3 * SMALL.num_layers


def test_gradients_of_padded_questions_and_images_are_finite(inputs):
    model = small_model("BAM-WC")
    with record_kl() as kl:
        logits = model(**inputs)
    (logits.square().sum() + kl.total()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name


@pytest.mark.parametrize("variant", ["soft", "BAM-WC"])
def test_noise_on_padding_changes_nothing(variant, inputs):
    model = small_model(variant).eval()
    padding = ~inputs["region_mask"][..., None]
    noisy = torch.where(padding, 1e4 * torch.randn(3, 6, 4), inputs["regions"])
    with torch.no_grad():
        assert torch.equal(model(**inputs), model(**{**inputs, "regions": noisy}))


def test_more_padding_changes_nothing(inputs):
    model = small_model("BAM-WC").eval()
    wider = {name: torch.cat([value, value[:, :2]], dim=1) for name, value in inputs.items()}
    wider["word_mask"][:, 7:] = False
    wider["region_mask"][:, 6:] = False
    with torch.no_grad():
        # other shapes, other order of float32 sums of about ten terms of size one
        torch.testing.assert_close(model(**wider), model(**inputs), atol=1e-5, rtol=1e-5)


def test_features_are_scaled_before_anything_else(inputs):
    plain, scaled = small_model("soft").eval(), small_model("soft").eval()
    scaled.feature_scale.fill_(0.25)
    with torch.no_grad():
        # a power of two is exact
        assert torch.equal(scaled(**{**inputs, "regions": 4.0 * inputs["regions"]}), plain(**inputs))


def test_draws_differ_and_dropout_is_a_separate_switch(inputs):
    model = small_model("BAM-WC").eval()
    with torch.no_grad(), sampling(model):
        assert not torch.equal(model(**inputs), model(**inputs))
    soft = small_model("soft").eval()
    with torch.no_grad(), sampling(soft, dropout=True):
        assert not torch.equal(soft(**inputs), soft(**inputs))


def test_attention_dropout_is_on_the_weights_only_where_asked(inputs):
    sizes = MCANSize(
        width=12, num_heads=3, num_layers=1, feedforward_dim=10, word_dim=5, reduction_dim=7, fused_dim=11, dropout=0.0
    )
    still = small_model("soft", sizes).train()
    with torch.no_grad():
        assert torch.equal(still(**inputs), still(**inputs))
    dropping = small_model("soft", MCANSize(**{**vars(sizes), "attention_dropout": 0.5})).train()
    with torch.no_grad():
        assert not torch.equal(dropping(**inputs), dropping(**inputs))


@pytest.mark.parametrize("variant", ["soft", *STOCHASTIC])
def test_attention_maps_are_distributions_over_the_regions(variant, inputs):
    model = small_model(variant).eval()
    maps = attention_maps(model, inputs, num_samples=5, seed=1)
    expected = {"mean"} | ({"std"} if variant != "soft" else set()) | ({"prior"} if variant in CONTEXTUAL else set())
    assert set(maps) == expected
    for name in expected - {"std"}:
        assert maps[name].shape == (3, 3, 6)
        # sums of six float32 weights
        torch.testing.assert_close(maps[name].sum(dim=-1), torch.ones(3, 3), atol=1e-5, rtol=0)
        assert bool((maps[name].masked_select(~inputs["region_mask"][:, None]) == 0).all())


def test_attention_maps_repeat_with_their_seed_and_leave_the_generator_alone(inputs):
    model = small_model("BAM-WC").eval()
    before = torch.get_rng_state()
    first, second = (attention_maps(model, inputs, num_samples=3, seed=4) for _ in range(2))
    assert torch.equal(first["std"], second["std"])
    assert torch.equal(torch.get_rng_state(), before)
    assert not model._forward_hooks
    assert not model.region_attention._forward_hooks


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_every_config_is_what_its_name_says(name):
    config = load_config(name)
    dataset, *_, variant = name.split("-")
    assert config.data.dataset == dataset
    rivals = {"gumbel": "hard-gumbel", "hard": "hard-reinforce", "gaussian": "gaussian-context", "dropout": "mc-dropout"}
    assert config.attention.variant.removeprefix("BAM-").lower() == rivals.get(variant, variant)
    # the authors' Bayesian runs have no dropout on attention weights
    assert not config.attention.is_stochastic or config.model.attention_dropout == 0.0


def test_learning_rate_follows_the_papers_schedule():
    config = load_config("vqa2-wc")
    rates = [config.learning_rate * learning_rate_factor(config, epoch) for epoch in range(config.training.epochs)]
    expected = [2.5e-5, 5e-5, 7.5e-5, *[1e-4] * 7, 2e-5, 2e-5, 4e-6]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_heads": 5}, "num_heads must divide width 512, got 5"),
        ({"dropout": 1.0}, "dropout must be below 1, got 1.0"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
    ],
)
def test_impossible_sizes_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        build_config(MCANSize, settings)


def test_regions_have_a_place_only_where_the_grid_is_named(inputs):
    """Without places the answer does not depend on the order of the regions; with them it does."""
    inputs["region_mask"] = torch.ones_like(inputs["region_mask"])
    turned = {**inputs, "regions": inputs["regions"].flip(1)}
    plain = small_model("soft").eval()
    # float32 sums over the regions in another order
    torch.testing.assert_close(plain(**turned), plain(**inputs), rtol=1e-4, atol=1e-5)
    placed = small_model("soft", dataclasses.replace(SMALL, grid_cells=6)).eval()
    assert bool(((placed(**turned) - placed(**inputs)).abs() > 1e-3).any())


def test_another_number_of_regions_than_cells_is_an_error(inputs):
    placed = small_model("soft", dataclasses.replace(SMALL, grid_cells=5))
    with pytest.raises(ValueError, match="regions must have grid_cells = 5 regions, got 6"):
        placed(**inputs)


def test_every_map_takes_the_fused_backend_where_nobody_can_look_at_numbers(inputs, monkeypatch):
    """As in a recording of CUDA launches, which is how a step's cost is measured."""
    taken, choose = [], dense.choose
    monkeypatch.setattr(dense, "choose", lambda *args: taken.append(choose(*args)) or taken[-1])
    monkeypatch.setattr(multihead_arguments, "look_once", lambda *_: None)
    small_model("BAM-WC").train()(**inputs)
    assert taken == ["blocked"] * 3 * SMALL.num_layers
