"""`bayesattn doubt` on a small classifier in a local folder: table, JSON lines, page, and what it refuses."""

import io
import json
import os

import pytest
import torch
import transformers as hf
from rich.console import Console
from small_models import SMALL
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import bayesattn as ba
from bayesattn.cli import main
from bayesattn.cli.doubt import print_rows, read_texts
from bayesattn.integrations.hf.doubt import doubt_texts

WORDS = ["the", "film", "was", "dull", "un", "##watch", "##able", "fine", ",", "<", "b", ">", "&"]
TEXTS = ["the film was unwatchable", "fine , the film was fine", "<b> the film & dull"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("classifier")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    hf.BertTokenizer(vocab=vocabulary).save_pretrained(path)
    torch.manual_seed(0)
    names = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    config = hf.BertConfig(**{**SMALL, "vocab_size": len(vocabulary), "num_labels": 2}, **names)
    hf.BertForSequenceClassification(config).save_pretrained(path)
    return path


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n\n", encoding="utf-8")
    return path


def run(*arguments):
    with pytest.raises(SystemExit) as stop:
        main(list(map(str, arguments)))
    return stop.value.code


def test_json_lines_are_sorted_and_are_what_the_library_says(folder, texts, capsys):
    assert run("doubt", "--model", folder, "--text", texts, "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(row["text"] for row in rows) == sorted(TEXTS)
    assert [row["t"] for row in rows] == sorted(row["t"] for row in rows)
    # TEXTS has no empty line
    assert all(TEXTS[row["line"] - 1] == row["text"] for row in rows)
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    for row in rows:
        result = ba.uncertainty(model, dict(tokenizer(row["text"], return_tensors="pt")))
        assert row["t"] == pytest.approx(float(result.t), rel=1e-3)
        assert row["label"] == ["bad", "good"][int(result.label)]
        assert row["probability"] == pytest.approx(float(result.probabilities.max()), rel=1e-4)


def test_words_have_the_share_of_their_tokens(folder):
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    for pair in (TEXTS[0], (TEXTS[0], TEXTS[1])):
        (found,) = doubt_texts(model, tokenizer, [pair])
        joined = pair if isinstance(pair, str) else "\n".join(pair)
        assert "".join(piece for piece, _ in found.pieces) == joined == found.text
        assert sum(share for _, share in found.pieces) + found.special == pytest.approx(1.0)
        assert sum(map(sum, found.by_head.values())) == pytest.approx(1.0)
    (found,) = doubt_texts(model, tokenizer, [TEXTS[0]])
    encoded = tokenizer(TEXTS[0], return_tensors="pt")
    shares = ba.uncertainty(model, dict(encoded)).by_token[0]
    whole = dict(found.pieces)["unwatchable"]
    assert whole == pytest.approx(float(shares[4:7].sum() / shares.sum()), rel=1e-3)


def test_table_page_and_standard_input(folder, texts, tmp_path, capsys, monkeypatch):
    page = tmp_path / "doubt.html"
    assert run("doubt", "--model", folder, "--text", texts, "--html", page, "--most", 2) == 0
    assert "Least certain first" in capsys.readouterr().out
    written = page.read_text(encoding="utf-8")
    assert written.count("<article>") == 2
    assert "<b>" not in written.replace("<b>good</b>", "").replace("<b>bad</b>", "")
    monkeypatch.setattr("sys.stdin", io.StringIO(texts.read_text(encoding="utf-8")))
    assert run("doubt", "--model", folder, "--text", "-", "--json") == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_lines_end_at_line_breaks_alone(tmp_path, monkeypatch):
    # what str.splitlines takes for line ends as well, and a byte order mark
    odd = ["the\u2028film", "was\x0cdull", "fine\x85fine"]
    content = "\ufeff" + "\r\n".join([odd[0], "", *odd[1:]]) + "\n"
    path = tmp_path / "texts.txt"
    path.write_bytes(content.encode())
    expected = dict(zip([1, 3, 4], odd, strict=True))
    assert read_texts(str(path)) == expected
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content.encode()), encoding="utf-8"))
    assert read_texts("-") == expected


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"\n \n", "has no text"),
        (b"one\ttwo\nthree\n", "some lines have a tab"),
        (b"one\ttwo\n\ngood\t\n", "bad.txt, line 3: a pair needs a text before and after the tab"),
        (b"\tgood\n", "bad.txt, line 1: a pair needs"),
        ("très bon\n".encode("latin-1"), "bad.txt is not UTF-8: byte 0xe8 at position 2. Save it as UTF-8"),
    ],
)
def test_bad_texts_are_refused_by_name(folder, tmp_path, content, match, capsys):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    assert run("doubt", "--model", folder, "--text", path) == 2
    assert match in capsys.readouterr().err


def test_folders_without_a_trained_classifier_are_refused(folder, texts, tmp_path, capsys):
    assert run("doubt", "--model", tmp_path, "--text", texts) == 2
    assert "has no config.json" in capsys.readouterr().err
    encoder = tmp_path / "encoder"
    hf.AutoModelForSequenceClassification.from_pretrained(folder).bert.save_pretrained(encoder)
    for name in os.listdir(folder):
        if "token" in name or "vocab" in name:
            (encoder / name).write_bytes((folder / name).read_bytes())
    assert run("doubt", "--model", encoder, "--text", texts) == 2
    assert "would be random" in capsys.readouterr().err


def test_a_folder_without_tokenizer_files_is_refused(folder, texts, tmp_path, capsys):
    # transformers would make up a tokenizer that knows special tokens alone
    bare = tmp_path / "bare"
    hf.AutoModelForSequenceClassification.from_pretrained(folder).save_pretrained(bare)
    assert run("doubt", "--model", bare, "--text", texts) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"no tokenizer in {bare}: it has none of tokenizer.json, vocab.txt" in printed.err
    assert "tokenizer.save_pretrained" in printed.err
    # of other models it refuses to load one
    llama = tmp_path / "llama"
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
    hf.LlamaForSequenceClassification(hf.LlamaConfig(**sizes)).save_pretrained(llama)
    assert run("doubt", "--model", llama, "--text", texts) == 2
    assert f"no tokenizer in {llama}: " in capsys.readouterr().err


def test_a_single_string_is_not_taken_for_a_list_of_its_characters(folder):
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with pytest.raises(ValueError, match="texts must be a list of texts or of pairs of texts, got the string 'the film'"):
        next(doubt_texts(model, hf.AutoTokenizer.from_pretrained(folder), "the film"))


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """A classifier that sees one token in a text of one word: no attention score can move its answer."""
    path = tmp_path_factory.mktemp("causal")
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(path)
    torch.manual_seed(0)
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 8, "vocab_size": len(vocabulary), "pad_token_id": 0}
    hf.GPT2ForSequenceClassification(hf.GPT2Config(**sizes, initializer_range=0.4)).save_pretrained(path)
    return path


def test_an_answer_without_doubt_has_no_t_and_no_share(causal, tmp_path, capsys):
    texts, page = tmp_path / "texts.txt", tmp_path / "page.html"
    texts.write_text("fine\nthe film was dull\n", encoding="utf-8")
    assert run("doubt", "--model", causal, "--text", texts, "--json", "--html", page) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in rows] == ["the film was dull", "fine"]
    assert rows[0]["t"] > 0
    assert (rows[1]["std"], rows[1]["t"], rows[1]["special"]) == (0.0, None, 0.0)
    written = page.read_text(encoding="utf-8")
    assert "t = ∞ · 0 % of the variance in special tokens" in written
    assert "inf" not in written
    assert run("doubt", "--model", causal, "--text", texts) == 0
    assert "∞" in capsys.readouterr().out


def test_texts_that_are_cut_are_marked(causal, tmp_path, capsys):
    texts, page = tmp_path / "texts.txt", tmp_path / "page.html"
    # the model has eight positions
    lengths = {"fine " * 9: True, "dull " * 8: False, "the " * 30: True}
    texts.write_text("\n".join(lengths), encoding="utf-8")
    assert run("doubt", "--model", causal, "--text", texts, "--json", "--html", page) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["text"]: row["is_cut"] for row in rows} == lengths
    assert page.read_text(encoding="utf-8").count("cut: only its beginning was read") == 2
    assert run("doubt", "--model", causal, "--text", texts) == 0
    printed = capsys.readouterr().out
    assert printed.count("[cut]") == 3
    assert "2 of 3 texts are longer than the model reads" in printed
    assert "they are marked [cut]." in printed
    texts.write_text("fine", encoding="utf-8")
    capsys.readouterr()
    assert run("doubt", "--model", causal, "--text", texts) == 0
    assert "cut" not in capsys.readouterr().out


def test_without_a_terminal_stars_mark_the_doubtful_words(folder, texts, capsys):
    assert run("doubt", "--model", folder, "--text", texts) == 0
    printed = capsys.readouterr().out
    assert "text, the doubtful words in *stars*" in printed
    assert "reverse" not in printed
    (row,) = [line for line in printed.splitlines() if "unwatchable" in line.replace("*", "")]
    assert "*" in row
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    found = list(doubt_texts(model, hf.AutoTokenizer.from_pretrained(folder), TEXTS))
    on_screen = io.StringIO()
    rows = dict(enumerate(found, start=1))
    print_rows(rows, Console(file=on_screen, force_terminal=True, color_system="standard", width=150), as_json=False)
    assert "doubtful words in reverse" in on_screen.getvalue()
    assert "\x1b[7m" in on_screen.getvalue()
    assert "*" not in on_screen.getvalue()


def test_weights_that_are_not_safetensors_are_refused_with_what_to_do(folder, texts, tmp_path, capsys):
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (pickled / path.name).write_bytes(path.read_bytes())
    torch.save({}, pickled / "pytorch_model.bin")
    assert run("doubt", "--model", pickled, "--text", texts) == 2
    error = capsys.readouterr().err
    assert f"the weights in {pickled} cannot be loaded" in error
    assert "Only safetensors are read: load the model yourself and call model.save_pretrained(folder)" in error
