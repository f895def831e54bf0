"""What was added is saved and found again, alone or inside the host's own checkpoint; a plain reload is the plain model."""

import json
import logging

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from zoo import ARCHITECTURES, build, run

import bayesattn as ba
from bayesattn.convert import bayesianize, conversion_report, load_bayesian, save_bayesian
from bayesattn.convert.saving import CONFIG_FILE, WEIGHTS_FILE

CONFIG = ba.AttentionConfig("BAM-WC", weibull_k=3.0, prior_hidden_dim=4)


@pytest.fixture(autouse=True)
def _quiet():
    hf.logging.set_verbosity_error()
    yield
    hf.logging.set_verbosity_warning()


def priors(model) -> dict[str, torch.Tensor]:
    return {n: p for n, p in model.named_parameters() if "bayes_prior" in n}


def kl(model, inputs) -> torch.Tensor:
    with torch.no_grad(), ba.record_kl() as scope:
        run(model, inputs)
    return scope.total()


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_only_what_was_added_is_saved_and_it_loads_onto_a_plain_model(name, tmp_path):
    model, inputs = bayesianize(build(name), CONFIG), ARCHITECTURES[name].inputs(False)
    save_bayesian(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", WEIGHTS_FILE, CONFIG_FILE]
    assert sum(t.numel() for t in load_file(tmp_path / WEIGHTS_FILE).values()) == conversion_report(model).added_parameters
    torch.manual_seed(99)
    other = load_bayesian(build(name), tmp_path)
    assert conversion_report(other) == conversion_report(model)
    assert torch.equal(kl(other, inputs), kl(model, inputs))


@pytest.mark.parametrize("variant", ["BAM-NOKL", "BAM-LF", "BAM-WC"])
@pytest.mark.parametrize("name", ["albert", "bert", "llama", "t5", "bart", "clip", "swin", "modernbert", "mpnet"])
def test_save_pretrained_of_the_host_carries_everything(name, variant, tmp_path):
    model, inputs = bayesianize(build(name), ba.AttentionConfig(variant, weibull_k=3.0)), ARCHITECTURES[name].inputs(False)
    model.save_pretrained(tmp_path)
    assert "bayesattn" not in (tmp_path / "config.json").read_text()
    plain = type(model).from_pretrained(tmp_path).eval()
    assert not conversion_report(plain).converted
    assert torch.equal(run(plain, inputs), run(model, inputs))
    loaded = load_bayesian(plain, tmp_path)
    assert conversion_report(loaded) == conversion_report(model)
    assert all(torch.equal(value, priors(model)[key]) for key, value in priors(loaded).items())
    assert {m.bayes.config for m in loaded.modules() if hasattr(m, "bayes")} == {ba.AttentionConfig(variant, weibull_k=3.0)}


def test_shards_are_read_too(tmp_path):
    model = bayesianize(build("bert"), CONFIG)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load_bayesian(hf.BertForSequenceClassification.from_pretrained(tmp_path), tmp_path)
    assert all(torch.equal(value, priors(model)[key]) for key, value in priors(loaded).items())


def test_a_plain_reload_names_what_it_drops(tmp_path, caplog):
    bayesianize(build("bert"), CONFIG).save_pretrained(tmp_path)
    hf.logging.set_verbosity_warning()
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        hf.BertForSequenceClassification.from_pretrained(tmp_path)
    finally:
        logger.removeHandler(caplog.handler)
    assert "bayes_prior" in caplog.text


def test_a_checkpoint_of_another_config_is_refused():
    model, other = (bayesianize(build("bert"), ba.AttentionConfig("BAM-WC", weibull_k=k)) for k in (3.0, 4.0))
    with pytest.raises(RuntimeError, match=r"attention is \{'weibull_k': 3\.0\}, the model's is \{'weibull_k': 4\.0\}"):
        other.load_state_dict(model.state_dict())
    other.load_state_dict(build("bert").state_dict())


def test_a_state_dict_goes_round():
    model, torch_seed = bayesianize(build("bert"), CONFIG), torch.manual_seed(4)
    other = bayesianize(build("bert"), CONFIG)
    assert torch_seed is not None
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(value, priors(model)[key]) for key, value in priors(other).items())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / CONFIG_FILE).write_text("{"), "not a file that save_bayesian wrote"),
        (
            lambda folder: (folder / CONFIG_FILE).write_text('{"format": 9, "modules": {}}'),
            "format 9, but this",
        ),
        (lambda folder: (folder / WEIGHTS_FILE).write_bytes(b"\\0" * 20), "not a readable safetensors file"),
        (lambda folder: (folder / WEIGHTS_FILE).unlink(), "has bayesattn_config.json but not bayesattn.safetensors"),
        (lambda folder: (folder / CONFIG_FILE).unlink() or (folder / WEIGHTS_FILE).unlink(), "holds neither"),
    ],
)
def test_a_spoilt_folder_is_an_error_and_the_model_stays_plain(spoil, message, tmp_path):
    save_bayesian(bayesianize(build("bert"), CONFIG), tmp_path)
    spoil(tmp_path)
    model = build("bert")
    with pytest.raises(ValueError, match=message):
        load_bayesian(model, tmp_path)
    assert not conversion_report(model).converted


@pytest.mark.parametrize("change", ["missing", "shape", "module"])
def test_a_file_that_does_not_fit_is_an_error_and_the_model_stays_plain(change, tmp_path):
    save_bayesian(bayesianize(build("bert"), CONFIG), tmp_path)
    weights, description = load_file(tmp_path / WEIGHTS_FILE), json.loads((tmp_path / CONFIG_FILE).read_text())
    first = next(iter(weights))
    if change == "missing":
        del weights[first]
    elif change == "shape":
        weights[first] = torch.zeros(2, 2)
    else:
        description["modules"]["bert.encoder.layer.7.attention.self"] = CONFIG.to_dict()
    save_file(weights, tmp_path / WEIGHTS_FILE)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(description))
    model = build("bert")
    with pytest.raises(ValueError, match=r"differ in|has shape|does not have"):
        load_bayesian(model, tmp_path)
    assert not conversion_report(model).converted


def test_saving_a_plain_model_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="without Bayesian attention"):
        save_bayesian(build("bert"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_half_written_when_saving_fails(tmp_path, monkeypatch):
    model = bayesianize(build("bert"), CONFIG)
    save_bayesian(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("bayesattn.convert.saving.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_bayesian(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_priors_alone_say_what_is_missing_and_what_to_write(tmp_path, caplog):
    model = bayesianize(build("bert"), CONFIG)
    save_bayesian(model, tmp_path / "priors")
    added = conversion_report(model).added_parameters
    assert f"wrote {added:,} parameters of the priors" in caplog.text
    assert f"not the other {conversion_report(model).model_parameters - added:,}" in caplog.text
    assert "save_bayesian(model, folder, whole=True)" in caplog.text


@pytest.mark.parametrize("beside", ["whole", "host"])
def test_nothing_is_said_where_the_host_s_weights_are_saved(beside, tmp_path, caplog):
    model = bayesianize(build("bert"), CONFIG)
    if beside == "host":
        model.save_pretrained(tmp_path)
    save_bayesian(model, tmp_path, whole=beside == "whole")
    assert "save_bayesian" not in caplog.text


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "t5", "swin"])
def test_a_whole_model_goes_round_exactly(name, tmp_path):
    model, inputs = bayesianize(build(name), CONFIG), ARCHITECTURES[name].inputs(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    save_bayesian(model, tmp_path, whole=True)
    other = load_bayesian(build(name), tmp_path)
    assert conversion_report(other) == conversion_report(model)
    state = other.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(run(other, inputs), run(model, inputs))
    assert torch.equal(kl(other, inputs), kl(model, inputs))


def masked(tie: bool) -> hf.BertForMaskedLM:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 5, "vocab_size": 13}
    return hf.BertForMaskedLM(hf.BertConfig(tie_word_embeddings=tie, **sizes)).eval()


def test_tied_weights_are_written_once_and_stay_tied(tmp_path):
    model = bayesianize(masked(True), CONFIG)
    save_bayesian(model, tmp_path, whole=True)
    numbers = sum(tensor.numel() for tensor in load_file(tmp_path / WEIGHTS_FILE).values())
    buffers = sum(b.numel() for n, b in model.named_buffers() if n in model.state_dict() and not n.endswith("settings"))
    assert numbers == conversion_report(model).model_parameters + buffers
    other = load_bayesian(masked(True), tmp_path)
    words = other.bert.embeddings.word_embeddings.weight
    assert other.cls.predictions.decoder.weight is words
    assert torch.equal(words, model.bert.embeddings.word_embeddings.weight)


def test_untied_weights_do_not_fit_a_tied_model(tmp_path):
    save_bayesian(bayesianize(masked(False), CONFIG), tmp_path, whole=True)
    model = masked(True)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="are one tensor in the model and two different ones in the file"):
        load_bayesian(model, tmp_path)
    assert not conversion_report(model).converted
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_priors_do_not_replace_a_whole_model(tmp_path):
    model = bayesianize(build("bert"), CONFIG)
    save_bayesian(model, tmp_path, whole=True)
    before = (tmp_path / WEIGHTS_FILE).read_bytes()
    with pytest.raises(ValueError, match=r"holds a whole model.*whole=True"):
        save_bayesian(model, tmp_path)
    assert (tmp_path / WEIGHTS_FILE).read_bytes() == before
    save_bayesian(model, tmp_path, whole=True)


def test_a_whole_model_of_other_sizes_is_refused_and_the_model_stays_plain(tmp_path):
    save_bayesian(bayesianize(masked(True), CONFIG), tmp_path, whole=True)
    weights = load_file(tmp_path / WEIGHTS_FILE)
    weights["bert.encoder.layer.0.output.dense.weight"] = torch.zeros(8, 7)
    save_file(weights, tmp_path / WEIGHTS_FILE)
    model = masked(True)
    with pytest.raises(ValueError, match=r"output\.dense\.weight has shape \(8, 7\) in the file and \(8, 5\) in the model"):
        load_bayesian(model, tmp_path)
    assert not conversion_report(model).converted


def test_a_whole_peft_model_is_refused_with_the_way_out(tmp_path):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(bayesianize(build("bert"), CONFIG), peft.LoraConfig(target_modules=["query"]))
    with pytest.raises(ValueError, match="merge_and_unload"):
        save_bayesian(adapted, tmp_path, whole=True)
    assert not list(tmp_path.iterdir())
