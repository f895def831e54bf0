"""The pictures of doubt: every word and patch is in its place, the shade follows its share, and wrong sizes are refused."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

import bayesattn as ba
from bayesattn.plots import plot_doubt, plot_image_doubt
from bayesattn.plots.style import BAD

TEXT = "the film was $5 worth of <b> unwatchable nonsense , and yet somehow I sat through all of it to the very end"
WORDS = TEXT.split()


def heads():
    return {"layer.0": torch.tensor([0.1, 0.3]), "layer.1": torch.tensor([0.4, 0.2])}


def test_words_are_shaded_by_their_share(tmp_path):
    variance = torch.zeros(len(WORDS))
    variance[7], variance[2] = 0.9, 0.1
    figure = plot_doubt(WORDS, variance, heads(), torch.tensor([0.4, 0.6]), class_names=["bad", "good"], title="a review")
    texts = {text.get_text(): text for text in figure.axes[0].texts}
    assert list(texts) == list(dict.fromkeys(WORDS))
    colors = {word: texts[word].get_bbox_patch().get_facecolor() for word in ("unwatchable", "was", "film")}
    assert colors["unwatchable"][:3] == pytest.approx(to_rgb(BAD))
    assert colors["unwatchable"][3] > colors["was"][3] > colors["film"][3] == 0.0
    assert len({text.get_position() for text in figure.axes[0].texts}) == len(WORDS)
    figure.savefig(tmp_path / "doubt.png")


def test_one_layer_has_one_number():
    figure = plot_doubt(["a"], torch.ones(1), {"layer.0": torch.tensor([0.1, 0.3])}, torch.tensor([0.4, 0.6]))
    assert {tick for tick in figure.axes[1].get_yticks() if -0.5 <= tick <= 0.5} == {0.0}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tokens": WORDS[:-1]}, "one value for each of the 22 tokens, got"),
        ({"by_head": {}}, "by_head is empty"),
        ({"class_names": ["one"]}, "class_names must have 2 entries, got 1"),
    ],
)
def test_wrong_sizes_are_refused(change, match):
    arguments = {"tokens": WORDS, "by_token": torch.ones(len(WORDS)), "by_head": heads(), "probabilities": torch.ones(2) / 2}
    with pytest.raises(ValueError, match=match):
        plot_doubt(**{**arguments, **change})


def test_patches_lie_where_they_are_in_the_image():
    """A bright patch at row 2, column 1 of 3 × 5, behind a class token and a register that have other values."""
    variance = torch.zeros(2 + 15)
    variance[0], variance[2 + 2 * 5 + 1] = 0.6, 0.4
    figure = plot_image_doubt(torch.zeros(24, 40, 3), variance, heads(), torch.ones(2) / 2, grid=(3, 5))
    light = np.asarray(figure.axes[1].images[0].get_array()).sum(axis=2)
    row, column = np.unravel_index(light.argmax(), light.shape)
    assert (row // 8, column // 8) == (2, 1)
    assert light[:8].max() < light.max()
    assert "60%" in figure.axes[1].get_title()


def test_an_image_transformer_is_drawn_as_it_comes(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=32, image_size=(24, 40), patch_size=8,
        num_labels=3,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).eval()
    image = torch.rand(24, 40, 3)
    found = ba.uncertainty(model, {"pixel_values": image.permute(2, 0, 1).unsqueeze(0)})
    by_head = {name: values[0] for name, values in found.by_head.items()}
    figure = plot_image_doubt(image, found.by_token[0], by_head, found.probabilities[0], grid=(3, 5))
    share = float(found.by_token[0, 0] / found.by_token[0].sum())
    assert f"{share:.0%}" in figure.axes[1].get_title().replace("\n", " ")
    assert figure.axes[2].images[0].get_array().shape == (2, 3)
    figure.savefig(tmp_path / "doubt.png")


def test_an_image_with_too_few_patches_is_refused():
    with pytest.raises(ValueError, match="one value per patch"):
        plot_image_doubt(torch.zeros(24, 40, 3), torch.ones(14), heads(), torch.ones(2) / 2, grid=(3, 5))
