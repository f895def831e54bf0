"""tune_noise: chooses what the validation data prefer, reports honest numbers, and works on a real pretrained encoder."""

import lzma
import shutil

import pytest
import torch
import transformers as hf
from zoo import ARCHITECTURES, build, run

import bayesattn as ba
from bayesattn import metrics
from bayesattn.convert import bayesianize, conversion_report, load_bayesian, restore, save_bayesian
from bayesattn.doubt import NoiseTuning, tune_noise
from data import shared_data

IDS = torch.ones(2, 3, dtype=torch.long)


def batches(model, flip: float, count: int = 3) -> list[dict[str, torch.Tensor]]:
    """Inputs labeled by the model itself, a fraction of the labels flipped: how over-confident the model is, is known."""
    generator = torch.Generator().manual_seed(4)
    result = []
    for _ in range(count):
        ids = torch.randint(3, 61, (16, 7), generator=generator)
        with torch.no_grad():
            labels = model(input_ids=ids).logits.argmax(dim=-1)
        flipped = torch.rand(16, generator=generator) < flip
        result.append({"input_ids": ids, "labels": torch.where(flipped, 1 - labels, labels)})
    return result


@pytest.mark.parametrize("name", ["bert", "swin", "t5"])
def test_chunks_of_repeated_inputs_change_nothing(name):
    """Also where a model cuts its examples into windows."""
    model = bayesianize(build(name), ba.AttentionConfig("BAM-WC", weibull_k=1.0))
    inputs = ARCHITECTURES[name].inputs(False)

    def first_of(result) -> torch.Tensor:
        return result.logits if hasattr(result, "logits") else result[0]

    alone, together, pairs = (
        ba.predict(model, inputs, 5, seed=3, chunk_size=size, batch_dims=0, output=first_of).logits for size in (1, None, 2)
    )
    assert float(alone.std(dim=0).max()) > 1e-3
    for other in (together, pairs):
        # float32 in matrix products of another size
        torch.testing.assert_close(other, alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("variant", ["BAM-WC", "BAM-LF"])
def test_the_chosen_value_has_the_best_validation_likelihood(variant):
    model = build("bert")
    data = batches(model, 0.3)
    bayesianize(model, ba.AttentionConfig(variant))
    result = tune_noise(model, data, num_samples=4, seed=1)
    chosen = result.nll_by_value[next(iter(result.values.values()))]
    assert chosen == min(result.nll_by_value.values()) == pytest.approx(result.after.nll)
    assert set(result.values) == {f"{name}.bayes" for name in conversion_report(model).converted}
    for module in model.modules():
        if hasattr(module, "bayes"):
            assert getattr(module.bayes.config, result.parameter) == next(iter(result.values.values()))


def test_before_is_the_deterministic_model():
    model = build("bert")
    data = batches(model, 0.3)
    with torch.no_grad():
        probabilities = torch.cat([torch.softmax(model(input_ids=b["input_ids"]).logits, dim=-1) for b in data])
    labels = torch.cat([b["labels"] for b in data])
    result = tune_noise(bayesianize(model, ba.AttentionConfig("BAM-WC")), data, candidates=[5.0], num_samples=2)
    assert result.before.nll == pytest.approx(float(metrics.negative_log_likelihood(probabilities, labels).mean()), rel=1e-5)
    confidence, right = probabilities.max(dim=-1).values, metrics.correct(probabilities, labels)
    assert result.before.ece == pytest.approx(float(metrics.expected_calibration_error(confidence, right)), rel=1e-5)
    assert result.before.aurc == pytest.approx(float(metrics.aurc(confidence, right)), rel=1e-5)


@pytest.mark.parametrize("passes", [{}, {"batch_dims": 0, "chunk_size": 2}])
def test_after_is_the_m_sample_predictive_with_the_chosen_noise(passes):
    model = build("bert")
    data = batches(model, 0.3, count=1)
    bayesianize(model, ba.AttentionConfig("BAM-WC"))
    result = tune_noise(model, data, candidates=[2.0], num_samples=4, seed=6, **passes)
    predicted = ba.predict(model, {"input_ids": data[0]["input_ids"]}, num_samples=4, seed=6, **passes)
    probabilities, labels = predicted.mean, data[0]["labels"]
    confidence, right = probabilities.max(dim=-1).values, metrics.correct(probabilities, labels)
    assert result.after.nll == pytest.approx(float(metrics.negative_log_likelihood(probabilities, labels).mean()), rel=1e-5)
    assert result.after.ece == pytest.approx(float(metrics.expected_calibration_error(confidence, right)), rel=1e-5)
    assert result.after.aurc == pytest.approx(float(metrics.aurc(confidence, right)), rel=1e-5)
    assert all(f"{name}  " in str(result) for name in ("nll", "ece", "aurc"))


def test_layer_by_layer_is_at_least_as_good():
    model = build("bert")
    data = batches(model, 0.4)
    bayesianize(model, ba.AttentionConfig("BAM-WF"))
    common = tune_noise(model, data, candidates=[20.0, 2.0, 0.5], num_samples=4)
    layered = tune_noise(model, data, candidates=[20.0, 2.0, 0.5], num_samples=4, per_layer=True)
    assert layered.after.nll <= common.after.nll + 1e-9
    assert "weibull_k" in str(layered)


def rows_through(model) -> list[int]:
    """Count the rows of all forward passes from now on, however they are cut into batches."""
    rows = [0]

    def count(module, args, output):
        rows[0] += output.shape[0]

    model.classifier.register_forward_hook(count)
    return rows


@pytest.mark.parametrize("variant", ["BAM-WC", "BAM-LF"])
def test_few_candidates_are_tried_and_none_twice(variant):
    model = build("bert")
    data = batches(model, 0.3)
    rows = rows_through(bayesianize(model, ba.AttentionConfig(variant)))
    result = tune_noise(model, data, num_samples=3)
    assert len(result.nll_by_value) == 5
    # three batches of 16: the deterministic model, and three draws per candidate; a full grid of before would be 8 + 1
    assert rows == [48 * (1 + 3 * 5)]
    assert len(result.candidates) == 12
    noise = [1.0 / k for k in result.candidates] if variant == "BAM-WC" else list(result.candidates)
    assert noise == sorted(noise)


def test_a_layer_tries_its_neighbors_only():
    model = build("bert")
    data = batches(model, 0.3, count=1)
    rows = rows_through(bayesianize(model, ba.AttentionConfig("BAM-WC")))
    result = tune_noise(model, data, candidates=[9.0, 3.0, 1.0], num_samples=2, per_layer=True)
    trials = (rows[0] // 16 - 1) // 2 - len(result.nll_by_value)
    assert 2 <= trials <= 4
    assert len(result.values) == 2


def test_candidates_are_compared_under_the_same_draws():
    model = bayesianize(build("bert"), ba.AttentionConfig("BAM-WC"))
    data = batches(model, 0.3, count=1)
    nll = [
        next(iter(tune_noise(model, data, candidates=[k], num_samples=2, seed=seed).nll_by_value.values()))
        for k, seed in ((1.0, 0), (1.00001, 0), (1.0, 1))
    ]
    assert 0.0 < abs(nll[1] - nll[0]) < 0.01 * abs(nll[2] - nll[0])


def test_every_candidate_is_a_line_with_the_time_left(capsys):
    model = build("bert")
    data = batches(model, 0.3, count=1)
    bayesianize(model, ba.AttentionConfig("BAM-WC"))
    result = tune_noise(model, data, candidates=[9.0, 2.0], num_samples=2)
    output, errors = capsys.readouterr()
    lines = errors.splitlines()
    assert output == ""
    assert lines[0].startswith(f"tune_noise: deterministic: NLL {result.before.nll:.4f}, about ")
    assert lines[1].startswith(f"tune_noise: weibull_k = 9: NLL {result.nll_by_value[9.0]:.4f}, about ")
    assert lines[1].endswith(" s left")
    assert lines[2] == f"tune_noise: weibull_k = 2: NLL {result.nll_by_value[2.0]:.4f}"
    assert result.at_edge is not None
    assert lines[3].endswith(result.at_edge)
    assert len(lines) == 4
    tune_noise(model, data, candidates=[9.0, 2.0], num_samples=2, quiet=True)
    assert capsys.readouterr() == ("", "")


def test_a_choice_at_an_end_of_the_candidates_is_said():
    model = build("bert")
    certain, guessing = batches(model, 0.0), batches(model, 0.5)
    bayesianize(model, ba.AttentionConfig("BAM-WC"))
    # enormous noise on a model that is always right, and hardly any
    least = tune_noise(model, certain, candidates=[1000.0, 0.05, 0.04], num_samples=4)
    assert least.at_edge == "weibull_k = 1000 is the least noise of all candidates: the data ask for hardly any"
    assert least.at_edge in str(least)
    quality = least.before
    most = NoiseTuning("sigma_q", {"a": 2.0}, (0.5, 2.0), {}, quality, quality)
    assert str(most).endswith("sigma_q = 2 is the most noise of all candidates; more may be better: give candidates=[...]")
    inside = NoiseTuning("sigma_q", {"a": 1.0}, (0.5, 1.0, 2.0), {}, quality, quality)
    assert inside.at_edge is None
    assert tune_noise(model, guessing, candidates=[5.0], num_samples=2).at_edge is None


@pytest.mark.parametrize("convert", [False, True])
def test_a_model_without_noise_is_told_how_to_get_some(convert):
    model = build("bert")
    data = batches(model, 0.3, count=1)
    if convert:
        bayesianize(model, ba.AttentionConfig("soft"))
    with pytest.raises(ValueError, match=r"Convert it first: model = ba\.bayesianize\(model, ba\.AttentionConfig"):
        tune_noise(model, data)


def test_parts_that_are_kept_in_eval_mode_stay_there():
    model = build("bert")
    data = batches(model, 0.3, count=1)
    bayesianize(model, ba.AttentionConfig("BAM-WC")).train()
    model.bert.embeddings.eval()
    tune_noise(model, data, candidates=[5.0], num_samples=2)
    assert model.training
    assert not model.bert.embeddings.training


def test_the_report_shows_the_choice():
    model = build("bert")
    data = batches(model, 0.3, count=1)
    bayesianize(model, ba.AttentionConfig("BAM-WC"), layers=[0])
    assert "BAM-WC, weibull_k = 5\n" in str(conversion_report(model))
    tune_noise(model, data, candidates=[3.5], num_samples=2)
    assert [row.noise for row in conversion_report(model).rows] == ["weibull_k = 3.5", None]
    assert "BAM-WC, weibull_k = 3.5\n" in str(conversion_report(model))
    assert "sigma_q = 0.3" in str(conversion_report(bayesianize(build("bert"), ba.AttentionConfig("BAM-LF"))))
    assert "soft\n" in str(conversion_report(bayesianize(build("bert"), ba.AttentionConfig("soft"))))


def test_the_choice_is_saved(tmp_path):
    model = build("bert")
    data = batches(model, 0.4)
    bayesianize(model, ba.AttentionConfig("BAM-WC"))
    tune_noise(model, data, candidates=[3.5], num_samples=2)
    save_bayesian(model, tmp_path)
    assert load_bayesian(build("bert"), tmp_path).bert.encoder.layer[0].attention.self.bayes.config.weibull_k == 3.5
    model.save_pretrained(tmp_path / "host")
    assert load_bayesian(build("bert"), tmp_path / "host").bert.encoder.layer[0].attention.self.bayes.config.weibull_k == 3.5


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([], {}, "batches have no label to tune on"),
        (
            [{"input_ids": IDS, "labels": torch.tensor([-100, -100])}],
            {},
            "batches have no label to tune on",
        ),
        ([{"input_ids": IDS}], {}, "each batch must be a pair .*, got dict"),
        (
            [{"input_ids": IDS, "labels": torch.tensor([0])}],
            {},
            r"labels must have shape \(2,\) to fit the logits, got \(1,\)",
        ),
        (
            [{"input_ids": IDS, "labels": torch.tensor([0, 1])}],
            {"candidates": [-1.0]},
            "candidates must be one or more finite numbers above 0, got",
        ),
    ],
)
def test_bad_data_are_named_and_the_model_keeps_its_noise(data, options, message):
    model = bayesianize(build("bert"), ba.AttentionConfig("BAM-WC", weibull_k=7.0))
    with pytest.raises(ValueError, match=message):
        tune_noise(model, data, num_samples=2, **options)
    assert model.bert.encoder.layer[0].attention.self.bayes.config.weibull_k == 7.0


def test_predict_takes_what_a_tokenizer_returns():
    model = bayesianize(build("bert"), ba.AttentionConfig("BAM-WC", weibull_k=1.0))
    inputs = hf.BatchEncoding(ARCHITECTURES["bert"].inputs(True))
    pred = ba.predict(model, inputs, num_samples=5, seed=0)
    assert pred.samples.shape == (5, 2, 2)
    assert pred.samples.std(dim=0).max() > 1e-4
    assert torch.equal(pred.samples, ba.predict(model, inputs, num_samples=5, seed=0).samples)


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory):
    data = shared_data()
    if data is None or not (data / "encoder_e5_small_hf").is_dir():
        pytest.skip("the pretrained encoder is not at hand (set BAYESATTN_DATA)")
    folder = tmp_path_factory.mktemp("encoder")
    for path in (data / "encoder_e5_small_hf").iterdir():
        if path.suffix == ".xz":
            with lzma.open(path) as packed, (folder / path.stem).open("wb") as file:
                shutil.copyfileobj(packed, file)
        else:
            shutil.copy(path, folder / path.name)
    return folder


@pytest.mark.slow
def test_a_real_encoder_converts_samples_tunes_saves_and_comes_back(encoder_folder, tmp_path):
    tokenizer = hf.AutoTokenizer.from_pretrained(encoder_folder)
    encoder = hf.AutoModel.from_pretrained(encoder_folder, dtype=torch.float32).eval()
    texts = ["query: how warm is the sea in june", "query: rule of the offside trap", "query: bread"]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        before = run(encoder, inputs)
    bayesianize(encoder, ba.AttentionConfig("BAM-WC"))
    # 12 layers, keys of 32 features: 12 × (32·10 + 10 + 10 + 1), 0.012 % of 33.4 million
    assert conversion_report(encoder).added_parameters == 12 * 341
    assert conversion_report(encoder).added_parameters < 1e-3 * conversion_report(encoder).model_parameters
    with torch.no_grad():
        assert torch.equal(run(encoder, inputs), before)
        with ba.sampling(encoder), ba.record_kl() as kl:
            assert not torch.equal(run(encoder, inputs), before)
    assert len(kl) == 12
    assert torch.isfinite(kl.total())

    def similarities(output):
        # which of the three texts is this one? similarity of mean-pooled features to the plain model's
        mask = torch.ones(output.last_hidden_state.shape[:2]).unsqueeze(-1)
        pooled = (output.last_hidden_state * mask).sum(1) / mask.sum(1)
        reference = (before * mask[:3]).sum(1) / mask[:3].sum(1)
        return 20.0 * torch.nn.functional.normalize(pooled, dim=-1) @ torch.nn.functional.normalize(reference, dim=-1).T

    labeled = [{**inputs, "labels": torch.arange(3)}]
    tuned = tune_noise(encoder, labeled, candidates=[20.0, 5.0], num_samples=2, output=similarities)
    assert tuned.after.nll == min(tuned.nll_by_value.values())
    save_bayesian(encoder, tmp_path)
    again = load_bayesian(hf.AutoModel.from_pretrained(encoder_folder, dtype=torch.float32).eval(), tmp_path)
    with torch.no_grad():
        assert torch.equal(run(again, inputs), before)
        assert torch.equal(run(restore(encoder), inputs), before)
