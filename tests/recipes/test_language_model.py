"""Encoders: packed weights, tokenizers, dropout rates, ALBERT's prior, and configs with the paper's settings."""

import json
import lzma
import os

import pytest
import torch
import transformers as hf

import bayesattn as ba
from bayesattn.convert import bayesianize, conversion_report
from bayesattn_recipes.language import model as encoders
from bayesattn_recipes.language.features import Collator, encode
from bayesattn_recipes.language.train import CONFIGS, load_config
from data import shared_data

SOFT = ba.AttentionConfig("soft")


@pytest.fixture
def packed(tmp_path):
    """A tiny encoder in the layout of e5-small's folder: fp16 weights as .xz, tokenizer and config beside them."""
    tokenizer = encoders.tiny_tokenizer(["the box is dark blue"])
    encoder = hf.BertModel(encoders.encoder_config("tiny", tokenizer)).half()
    folder = tmp_path / "encoder_e5_small_hf"
    encoder.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    plain = folder / "model.safetensors"
    (folder / "model.safetensors.xz").write_bytes(lzma.compress(plain.read_bytes()))
    plain.unlink()
    return folder, encoder


def load(folder, attention=SOFT):
    where = encoders.find_encoder("e5-small", folder.parent)
    tokenizer = encoders.load_tokenizer(where, list)
    config = encoders.set_up(encoders.encoder_config(where, tokenizer), "classification", 3, {"dropout": 0.0})
    return encoders.load_pretrained(where, config, "classification", attention)


def test_packed_weights_become_fp32(packed):
    folder, encoder = packed
    model = load(folder)
    for name, value in model.base_model.state_dict().items():
        if ".bayes." not in name:
            assert value.dtype == torch.float32
            assert torch.equal(value, encoder.state_dict()[name].float())
    assert model.classifier.out_features == 3


def test_packed_weights_go_to_the_cache_folder_of_the_user(packed, tmp_path, monkeypatch):
    folder, encoder = packed
    monkeypatch.setenv(encoders.CACHE_VARIABLE, str(tmp_path / "cache"))
    model = load(folder)
    (written,) = (tmp_path / "cache").iterdir()
    assert written.name.endswith("model.safetensors")
    assert torch.equal(model.base_model.pooler.dense.weight, encoder.pooler.dense.weight.float())


def test_plain_folder_is_loaded_by_its_path(packed, tmp_path):
    folder, encoder = packed
    (folder / "model.safetensors").write_bytes(lzma.decompress((folder / "model.safetensors.xz").read_bytes()))
    config = encoders.set_up(encoders.encoder_config(str(folder), encoders.tiny_tokenizer(["a"])), "spans", 2, {})
    model = encoders.load_pretrained(encoders.find_encoder(str(folder), None), config, "spans", SOFT)
    assert isinstance(model, hf.BertForQuestionAnswering)
    assert model.dtype == torch.float32
    assert torch.equal(model.bert.embeddings.word_embeddings.weight, encoder.embeddings.word_embeddings.weight.float())


def test_missing_tokenizer_is_an_error(packed):
    folder, _ = packed
    for name in ("tokenizer.json", "vocab.txt"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"has no tokenizer. Give a folder with one of"):
        encoders.load_tokenizer(str(folder), list)


def test_broken_tokenizer_is_an_error(packed):
    folder, _ = packed
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer of .* cannot be loaded"):
        encoders.load_tokenizer(str(folder), list)


def test_weights_in_a_pickle_are_not_opened(packed):
    folder, encoder = packed
    (folder / "model.safetensors.xz").unlink()
    torch.save(encoder.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"the weights of encoder .* cannot be loaded"):
        load(folder)


@pytest.mark.parametrize("part", ["config", "tokenizer"])
def test_code_in_the_folder_of_an_encoder_is_never_run(packed, part, monkeypatch):
    """Hugging Face's format lets a folder bring its own classes; asked for in a terminal, "y" would run them."""
    folder, _ = packed
    monkeypatch.setattr("builtins.input", lambda *words: "y")
    (folder / "own.py").write_text("raise SystemExit('foreign code')")
    if part == "config":
        settings = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
        (folder / "config.json").write_text(json.dumps(settings))
        with pytest.raises(ValueError, match=r"the config of encoder .* cannot be loaded"):
            encoders.encoder_config(str(folder), encoders.tiny_tokenizer(["a"]))
    else:
        settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        # transformers reads tokenizer.json without the class that the settings name
        assert encoders.load_tokenizer(str(folder), list).vocab_size > 5


def test_weights_that_do_not_fit_are_named(packed):
    folder, encoder = packed
    weights = {name: value for name, value in encoder.state_dict().items() if "pooler" not in name}
    model = hf.BertForSequenceClassification(encoder.config)
    with pytest.raises(ValueError, match=r"do not match their config: \['pooler"):
        encoders.load_encoder(model, weights, str(folder))


@pytest.mark.parametrize(
    ("name", "message"),
    [("e5-small", "encoder_e5_small_hf, which is not in the data folder"), ("./nowhere", "which is not a folder")],
)
def test_encoder_that_is_not_there_is_an_error(name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        encoders.find_encoder(name, tmp_path)


def test_dropout_rates_reach_the_layers():
    tokenizer = encoders.tiny_tokenizer(["a b"])
    rates = {"dropout": 0.25, "attention_dropout": 0.0, "classifier_dropout": 0.375}
    config = encoders.set_up(encoders.encoder_config("tiny", tokenizer), "classification", 2, rates)
    model = encoders.build_model(config, "classification", SOFT)
    assert model.dropout.p == 0.375
    assert model.bert.embeddings.dropout.p == 0.25
    assert model.bert.encoder.layer[0].attention.self.dropout.p == 0.0


def test_rate_that_an_encoder_does_not_have_is_an_error():
    with pytest.raises(ValueError, match="because a gpt2 encoder has no such rate"):
        encoders.set_up(hf.GPT2Config(), "classification", 2, {"classifier_dropout": 0.1})


def test_sampled_attention_has_no_attention_dropout_unless_asked():
    assert load_config("mrpc").dropout_rates["attention_dropout"] == 0.0
    assert load_config("mrpc", ["attention.variant=soft"]).dropout_rates["attention_dropout"] is None
    assert load_config("mrpc", ["attention_dropout=0.2"]).dropout_rates["attention_dropout"] == 0.2


def test_albert_base_gets_the_papers_331_parameters():
    config = hf.AlbertConfig(
        embedding_size=128, hidden_size=768, num_attention_heads=12, intermediate_size=3072, num_hidden_layers=12
    )
    with torch.device("cpu"):
        model = bayesianize(hf.AlbertForSequenceClassification(config), load_config("albert-mrpc").attention)
    assert conversion_report(model).added_parameters == 331


def test_every_config_loads():
    names = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    assert len(names) == 22
    for name in names:
        config = load_config(name)
        assert config.task == name.removeprefix("albert-")


@pytest.mark.parametrize(
    ("name", "rate", "batch", "dropout", "steps", "warmup", "length", "k"),
    [
        ("cola", 1e-5, 16, 0.0, 5336, 320, 512, 10),
        ("stsb", 2e-5, 16, 0.0, 3598, 214, 512, 20),
        ("sst2", 1e-5, 32, 0.0, 20935, 1256, 512, 1000),
        ("mnli", 3e-5, 128, 0.0, 10000, 1000, 512, 5),
        ("qnli", 1e-5, 32, 0.0, 33112, 1986, 512, 500),
        ("qqp", 5e-5, 128, 0.1, 14000, 1000, 512, 1000),
        ("rte", 3e-5, 32, 0.1, 800, 200, 512, 1000),
        ("mrpc", 2e-5, 32, 0.0, 800, 200, 512, 100),
        ("squad1", 5e-5, 48, 0.0, 3649, 365, 384, 10),
        ("squad2", 3e-5, 48, 0.0, 8144, 814, 512, 2000),
    ],
)
def test_albert_configs_have_the_papers_settings(name, rate, batch, dropout, steps, warmup, length, k):
    config = load_config(f"albert-{name}")
    training = config.training
    assert (training.learning_rate, training.batch_size, training.steps, training.warmup) == (rate, batch, steps, warmup)
    assert (config.dropout, config.classifier_dropout, config.max_length) == (dropout, 0.1, length)
    attention = config.attention
    assert (attention.weibull_k, attention.gamma_beta, attention.prior_hidden_dim) == (k, 1e-2, 5)
    assert training.kl_schedule.kind == "constant"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["max_length=600"], "max_length must be at most 512, got 600"),
        (["dropout=1.5"], "dropout must be below 1, got 1.5"),
        (["task=glue"], "got 'glue'"),
        (
            ["training.keep=validation_f2"],
            "training.keep must be one of 'last', 'validation_loss', 'validation_acc",
        ),
        (["training.steps=0"], "steps must be at least 1, got 0"),
        (["training.learning_rate=0"], "training.learning_rate must be above 0, got 0"),
        (["training.stesp=3"], "mrpc.yaml: training.stesp is unknown. Use one of accumulation_steps"),
        (["train_size=0"], "train_size must be at least 1, got 0"),
    ],
)
def test_bad_setting_is_an_error(settings, message):
    with pytest.raises(ValueError, match=r"must be|is unknown") as raised:
        load_config("mrpc", settings)
    assert message in str(raised.value)


def test_long_text_is_cut_and_counted():
    tokenizer = encoders.tiny_tokenizer(["one two three"])
    encoded = encode(tokenizer, [("one two",), ("one two three " * 9,), ("three",)], 11)
    assert encoded.truncated == [False, True, False]
    assert encoded.num_truncated == 1
    assert [len(row["input_ids"]) for row in encoded.rows] == [4, 11, 3]
    # the end is cut, the separator stays
    assert encoded.rows[1]["input_ids"][-1] == tokenizer.sep_token_id


def test_batches_are_padded_to_few_lengths():
    rows = [{"input_ids": [5] * n, "token_type_ids": [0] * n, "labels": n} for n in (3, 11, 7)]
    batch = Collator(pad_id=9, multiple=8, max_length=13)(rows)
    assert batch["input_ids"].shape == (3, 13)
    assert batch["attention_mask"].sum(dim=1).tolist() == [3, 11, 7]
    assert batch["input_ids"][0].tolist() == [5] * 3 + [9] * 10
    assert batch["labels"].tolist() == [3, 11, 7]


@pytest.mark.skipif(shared_data() is None, reason="the shared data folder is not there")
@pytest.mark.slow
def test_e5_small_loads_and_tells_sentences_apart():
    where = encoders.find_encoder("e5-small", shared_data())
    tokenizer = encoders.load_tokenizer(where, list)
    config = encoders.set_up(encoders.encoder_config(where, tokenizer), "classification", 2, {})
    model = encoders.load_pretrained(
        where, config, "classification", ba.AttentionConfig("BAM-WC", prior_hidden_dim=5)
    ).eval()
    encoded = encode(tokenizer, [("A man plays the guitar.",), ("A man is playing guitar.",), ("Stocks fell.",)], 64)
    batch = Collator(tokenizer.pad_token_id)(encoded.rows)
    with torch.no_grad():
        states = model.base_model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    vectors = torch.nn.functional.normalize((states * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)
    # the encoder was trained to put paraphrases beside one another
    assert float(vectors[0] @ vectors[1]) > float(vectors[0] @ vectors[2]) + 0.1
    # 12 layers × (32·5 + 5 + 5 + 1)
    assert conversion_report(model).added_parameters == 12 * 171


@pytest.mark.parametrize("has_cache", [False, True])
def test_packed_encoder_is_unpacked_once_for_all_processes(tmp_path, monkeypatch, has_cache):
    weights = tmp_path / f"{encoders.WEIGHTS}.xz"
    weights.touch()
    monkeypatch.delenv(encoders.CACHE_VARIABLE, raising=False)
    if has_cache:
        monkeypatch.setenv(encoders.CACHE_VARIABLE, str(tmp_path / "cache"))
    seen = []
    monkeypatch.setattr(
        "bayesattn_recipes.language.model.packed_weights",
        lambda path: seen.append((path, os.environ[encoders.CACHE_VARIABLE])),
    )
    with encoders.unpacked(str(tmp_path)):
        cache = os.environ[encoders.CACHE_VARIABLE]
    assert seen == [(weights, cache)]
    assert os.environ.get(encoders.CACHE_VARIABLE) == (str(tmp_path / "cache") if has_cache else None)
