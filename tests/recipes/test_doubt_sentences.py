"""Doubt about generated sentences: which log-probability is measured, how sentences are ranked, and what is kept of them."""

import csv
import io
import json
import math

import pytest
import torch
from rich.console import Console
from translation_data import generated_splits

import bayesattn as ba
from bayesattn.cli.registry import Request
from bayesattn.files import RunError
from bayesattn_recipes.captioning import scoring
from bayesattn_recipes.captioning.data import generate_shapes
from bayesattn_recipes.captioning.decoding import beam_search
from bayesattn_recipes.captioning.train import caption_split
from bayesattn_recipes.captioning.train import fit as fit_captioning
from bayesattn_recipes.captioning.train import load_config as load_captioning
from bayesattn_recipes.common.config import seed_everything
from bayesattn_recipes.common.doubt import with_noise
from bayesattn_recipes.doubt import elsewhere, sentences
from bayesattn_recipes.doubt.rankings import BASELINE, DEVIATION
from bayesattn_recipes.translation.batches import make_batch
from bayesattn_recipes.translation.data import MULTI30K
from bayesattn_recipes.translation.draws import decode
from bayesattn_recipes.translation.measure import sentence_uncertainty
from bayesattn_recipes.translation.train import TranslationExperiment
from bayesattn_recipes.translation.train import load_config as load_translation
from bayesattn_recipes.translation.vocabulary import END

SMALL = ["vocabulary_size=60", "embedding_dim=8", "encoder_dim=8", "decoder_dim=12", "attention_dim=8", "num_layers=1"]
SMALL += ["batch_tokens=100", "learning_rate=0.01", "training.epochs=1", "training.precision=fp32"]
TINY = ["width=12", "attention_dim=5", "training.epochs=1", "training.batch_size=500", "training.keep=last"]


@pytest.fixture(scope="module")
def translator():
    """A translator of random parameters that are large enough for long translations, and its vocabulary."""
    seed_everything(0)
    experiment = TranslationExperiment(load_translation("multi30k-soft", SMALL), generated_splits())
    with torch.no_grad():
        for parameter in experiment.model.parameters():
            parameter.mul_(8.0)
        experiment.model.readout.logits.weight.mul_(15.0)
    with with_noise(experiment.model.eval()) as model:
        yield model, experiment.vocabulary


@pytest.fixture(scope="module")
def images():
    data = generate_shapes((20, 7, 8), seed=1)
    # so short that most captions have no end
    model, _ = fit_captioning(
        load_captioning("flickr8k-soft", [*TINY, "dataset=shapes", "max_length=5", "min_count=1"]), data
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    with with_noise(model.eval()):
        yield model, data


def test_translations_are_the_recipes_own_and_their_log_probability_that_of_the_mean_model(translator, monkeypatch):
    model, vocabulary = translator
    sources = generated_splits()["test"].sources
    found = sentences.of_translations(model, vocabulary, sources)
    encoded = [[*tokens, END] for tokens in vocabulary.encode(sources)]
    best = decode(model, encoded)
    assert found.texts == [vocabulary.decode(tokens) for tokens in best]
    assert found.num_tokens == [len(tokens) + 1 for tokens in best]
    assert len(set(found.num_tokens)) > 2
    assert min(found.num_tokens) > 2
    nll = sentence_uncertainty(model, encoded, best, "mean", 1)["nll"]
    assert found.log_probabilities == pytest.approx([-value for value in nll], rel=1e-5)
    # padding changes nothing
    monkeypatch.setattr(sentences, "evaluation_tokens", lambda model: 1)
    alone = sentences.of_translations(model, vocabulary, sources)
    assert alone.texts == found.texts
    assert alone.deviations == pytest.approx(found.deviations, rel=1e-3)


def test_deviation_of_a_translation_is_that_of_draws(translator, monkeypatch):
    model, vocabulary = translator
    sources, k, count = generated_splits()["test"].sources[:2], 100.0, 4000
    exact = torch.tensor(sentences.of_translations(model, vocabulary, sources).deviations)
    # the deviation was measured for k = 5, and goes with 1/k
    monkeypatch.setattr(model.decoder.attention.weights, "config", ba.AttentionConfig("BAM-NOKL", weibull_k=k))
    encoded = [[*tokens, END] for tokens in vocabulary.encode(sources)]
    for row, (source, best) in enumerate(zip(encoded, decode(model, encoded), strict=True)):
        with torch.no_grad(), ba.sampling(model):
            nll = model(**make_batch([source] * count, [[*best, END]] * count))
        drawn = nll.double().sum(dim=1).var() / (len(best) + 1) ** 2
        assert float(drawn) == pytest.approx(float((exact[row] * 5.0 / k) ** 2), rel=5.0 * math.sqrt(2.0 / count))


def test_captions_are_the_recipes_own_and_their_log_probability_that_of_the_search(images, monkeypatch):
    model, data = images
    split = data.splits["test"]
    search = {"num_beams": 3, "max_length": 5, "length_penalty": 0.7}
    found = sentences.of_captions(model, data, split, search)
    assert found.texts == caption_split(model, data, split, **search)
    words = [len(text.split()) for text in found.texts]
    # those that were cut have no end
    assert found.num_tokens == [min(count + 1, 5) for count in words]
    assert 5 in words
    total = torch.tensor(found.log_probabilities) * torch.tensor(found.num_tokens)
    assert torch.allclose(total, beam_search(model, *data.regions.gather(split.rows), **search).log_prob, rtol=1e-4)
    assert all(value > 0 for value in found.deviations)
    monkeypatch.setattr(sentences, "IMAGES_PER_PASS", 3)
    again = sentences.of_captions(model, data, split, search)
    assert again.texts == found.texts
    assert again.deviations == pytest.approx(found.deviations, rel=1e-4)


def test_rankings_and_what_they_keep():
    said = sentences.Sentences(["a", "b", "c"], [2, 8, 3], [-1.0, -0.5, -2.0], [0.1, 0.4, 0.3])
    rows = {(r["row"], r["measure"]): r["value"] for r in sentences.measure(said, {"BLEU": torch.tensor([0.9, 0.6, 0.0])})}
    assert rows["all", "mean BLEU"] == pytest.approx(0.5)
    # b, a, c: the kept have BLEU 0.6, 0.75, 0.5
    assert rows[BASELINE, "BLEU of the kept"] == pytest.approx((0.6 + 0.75 + 0.5) / 3)
    assert rows[BASELINE, "Spearman with BLEU"] == pytest.approx(0.5)
    # a, c, b
    assert rows[DEVIATION, "BLEU of the kept"] == pytest.approx((0.9 + 0.45 + 0.5) / 3)
    # totals −2, −4, −6
    assert rows["total log-probability", "Spearman with BLEU"] == pytest.approx(1.0)
    # 10, 1.25, 6.7, and −0.1, −0.2, −0.6
    assert rows["log-probability / deviation", "Spearman with BLEU"] == pytest.approx(0.5)
    assert rows["log-probability × deviation", "Spearman with BLEU"] == pytest.approx(1.0)
    of_cider = sentences.measure(said, {"CIDEr": torch.tensor([9.0, 6.0, 0.0])})
    kept = [r["value"] for r in of_cider if r["row"] == BASELINE and r["measure"] == "CIDEr of the kept"]
    assert kept == pytest.approx([10.0 * rows[BASELINE, "BLEU of the kept"]])


def test_quality_of_a_caption_is_its_share_of_the_corpus_measure():
    pytest.importorskip("pycocoevalcap")
    references = [["a red ball", "the ball is red"], ["two dogs run"], ["a man rides a horse"]]
    captions = ["a red ball", "two cats", "a horse"]
    found = scoring.image_cider(captions, references)
    assert sum(found) / 3 == pytest.approx(scoring.score(captions, references, use_java=False).values["CIDEr"] / 100)
    assert found[0] > found[1]


def test_sentences_are_kept_and_scored_again_without_training(tmp_path, monkeypatch):
    pytest.importorskip("pycocoevalcap")
    folder, splits = tmp_path / "data" / "multi30k" / "task1_raw", generated_splits(60)
    folder.mkdir(parents=True)
    for name, stem in MULTI30K.items():
        pairs = splits.get(name, splits["test"])
        (folder / f"{stem}.de").write_text("\n".join(pairs.sources) + "\n")
        (folder / f"{stem}.en").write_text("\n".join(pairs.targets) + "\n")
    settings = {"translation": SMALL, "captioning": [*TINY, "dataset=shapes", "num_beams=1", "max_length=4"]}
    options = {"seeds": dict.fromkeys(elsewhere.PARTS, 1), "settings": settings}
    places = {"data": tmp_path / "data", "out": tmp_path / "out", "console": Console(file=io.StringIO())}
    request = Request(names=["captioning", "translation"], **places)
    shapes = generate_shapes((40, 10, 12))
    monkeypatch.setattr(elsewhere, "load_data", lambda *_: shapes)
    monkeypatch.setattr(scoring, "has_package", lambda: False)
    with pytest.raises(RunError, match="cannot be scored here: CIDEr needs pycocoevalcap"):
        elsewhere.run(request, **options)
    monkeypatch.setattr(scoring, "has_package", lambda: True)
    for name in ("run_translation", "run_captioning"):
        monkeypatch.setattr(elsewhere, name, lambda *_: pytest.fail("trained again"))
    path = tmp_path / "out" / "cells" / "multi30k-0.json"
    cell = json.loads(path.read_text())
    cell["measures"]["sentences"]["texts"] = splits["test"].targets
    path.write_text(json.dumps(cell))
    page = elsewhere.run(request, **options).read_text()
    with (tmp_path / "out" / "doubt-elsewhere.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["task", "seed", "row", "measure", "value"]
    assert {(r["task"], r["measure"]) for r in rows if r["row"] == "all"} == {
        ("multi30k", "mean BLEU"), ("multi30k", "mean chrF"), ("flickr8k", "mean CIDEr"),
    }  # fmt: skip
    assert "| multi30k, mean BLEU, all | 1 | 100.00 |" in page
    assert len({r["row"] for r in rows if r["measure"] == "Spearman with CIDEr"}) == 5
