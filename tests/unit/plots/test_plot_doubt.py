"""The picture of doubt: every word is there, the shade follows its share, and wrong sizes are refused."""

import pytest
import torch
from matplotlib.colors import to_rgb

from bayesattn.plots import plot_doubt
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


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tokens": WORDS[:-1]}, "one value per token"),
        ({"by_head": {}}, "by_head is empty"),
        ({"class_names": ["one"]}, "class_names has 1"),
    ],
)
def test_wrong_sizes_are_refused(change, match):
    arguments = {"tokens": WORDS, "by_token": torch.ones(len(WORDS)), "by_head": heads(), "probabilities": torch.ones(2) / 2}
    with pytest.raises(ValueError, match=match):
        plot_doubt(**{**arguments, **change})
