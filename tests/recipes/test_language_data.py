"""GLUE's files as they are distributed, from a folder or the archive; honest splits; bad rows named by their line."""

import lzma
import sys
import types
from collections import Counter

import pytest
from language_files import GLUE, write_archive, write_glue, write_sentiment

from bayesattn_recipes.language import data
from bayesattn_recipes.language.data import Example, from_rows, hold_out, load, read_examples, split_by
from bayesattn_recipes.language.files import parse_rows
from bayesattn_recipes.language.tasks import TASKS, find_task
from data import shared_data

NAMES = ("cola", "mrpc", "rte", "stsb", "sst2", "qnli", "qqp", "mnli", "wnli")
needs_data = pytest.mark.skipif(shared_data() is None, reason="the shared data folder is not there")


@pytest.fixture(scope="module")
def glue(tmp_path_factory):
    return write_glue(tmp_path_factory.mktemp("glue"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cola", Example(("Stayed she.",), 0)),
        ("mrpc", Example(('One " two .', "Three ."), 0)),
        ("rte", Example(("G.", "H."), 1)),
        ("stsb", Example(("E.", "F."), 3.8)),
        ("sst2", Example(("not bad ",), 1)),
        ("qnli", Example(("Where?", "Here."), 0)),
        ("qqp", Example(("Why?", "How come?"), 1)),
        ("mnli", Example(("E.", "F."), 0)),
        ("wnli", Example(("E.", "F."), 0)),
    ],
)
def test_dev_file_of_every_task_is_the_test_split(name, expected, glue):
    assert load(name, glue).splits["test"] == [expected]


@pytest.mark.parametrize("name", NAMES)
def test_archive_and_folder_hold_the_same(name, glue, tmp_path):
    write_archive(tmp_path / "glue" / "glue.tar.xz")
    assert load(name, tmp_path) == load(name, glue)
    assert load(name, tmp_path / "glue" / "glue.tar.xz") == load(name, glue)


def test_quotation_marks_are_text(glue):
    texts = [example.texts for part in load("mrpc", glue).splits.values() for example in part]
    assert ('" Fine , he said .', "He said it was fine .") in texts
    assert len(texts) == 4


def test_file_written_by_a_csv_library_is_unquoted():
    text = 'question1\tquestion2\tis_duplicate\n"""All"" or none?"\tWhat?\t1\n'
    rows = list(parse_rows(text, "file", quoted=True))
    assert rows[1] == (2, ['"All" or none?', "What?", "1"])


def test_unicode_line_separators_stay_inside_a_sentence():
    assert list(parse_rows("a\u2028b\tc\x85d\n", "file")) == [(1, ["a\u2028b", "c\x85d"])]


def test_cut_rows_of_qqp_are_counted(glue):
    read = load("qqp", glue)
    assert read.skipped == 1
    assert sum(map(len, read.splits.values())) == 3


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "rte",
            "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tentailment\n1\tC.\n",
            "line 3: the row must have 4 fields (index, sentence1, sentence2, label), got 2",
        ),
        (
            "rte",
            "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tmaybe\n",
            "line 2: label must be one of 'entailment', 'not_entailment', got 'maybe'",
        ),
        ("sst2", "sentence\tlabel\n   \t1\n", "line 2: sentence is empty"),
        ("stsb", GLUE["STS-B/dev.tsv"].replace("3.8", "7"), "line 2: score must be a number from 0 to 5, got '7'"),
        ("stsb", GLUE["STS-B/dev.tsv"].replace("3.8", "nan"), "line 2: score must be a number from 0 to 5, got 'nan'"),
        ("cola", "gj04\t1\tHe left.\n", "line 1: the row must have 4 fields (source, label, mark, sentence), got 3"),
        ("wnli", "index\tsentence1\tlabel\n", "line 1 has no column 'sentence2', only index, sentence1, label"),
        ("wnli", "", "is empty"),
        ("wnli", "index\tsentence1\tsentence2\tlabel\n", "must have at least one row below the header, got none"),
    ],
)
def test_bad_row_is_an_error_with_its_line(name, text, message):
    with pytest.raises(ValueError, match=r"^dev\.tsv") as raised:
        read_examples(find_task(name), text, "dev.tsv")
    assert message in str(raised.value)


def test_bytes_that_are_not_text_are_an_error_with_their_line(tmp_path):
    write_glue(tmp_path, {"WNLI/dev.tsv": GLUE["WNLI/dev.tsv"]})
    (tmp_path / "WNLI" / "train.tsv").write_bytes(b"index\tsentence1\tsentence2\tlabel\n0\t\xff\tB.\t1\n")
    with pytest.raises(ValueError, match=r"train\.tsv, line 2: not UTF-8"):
        load("wnli", tmp_path)


def test_broken_archive_is_an_error(tmp_path):
    path = tmp_path / "glue.tar.xz"
    path.write_bytes(write_archive(tmp_path / "whole.tar.xz").read_bytes()[:300])
    with pytest.raises(ValueError, match="cannot be read as a tar"):
        load("wnli", tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [("wnli", r"WNLI/train.tsv and dev.tsv of task 'wnli' was not found"), ("mnli", "glue_subsets")],
)
def test_missing_files_are_named(name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(name, tmp_path)


def test_data_folder_has_to_be_given():
    with pytest.raises(
        ValueError, match="data must be a folder, given by --data or the variable BAYESATTN_DATA, got nothing"
    ):
        load("rte", None)


def test_unknown_task_lists_the_known():
    with pytest.raises(ValueError, match=r"task must be one of cola, mrpc, .*, got 'glue'"):
        load("glue", None)


def test_hold_out_depends_on_the_texts_not_on_their_order():
    examples = [Example((f"text {i}",), i % 2) for i in range(101)]
    kept, taken = hold_out(examples, 0.1, 500)
    again = hold_out(examples[::-1], 0.1, 500)
    assert len(taken) == 10
    assert set(taken) == set(again[1])
    assert not set(kept) & set(taken)
    assert len(hold_out(examples, 0.9, 7)[1]) == 7


def test_equal_keys_land_on_the_same_side():
    examples = [Example((f"premise {i // 5}", f"hypothesis {i}"), 0) for i in range(505)]
    splits = split_by(examples, lambda example: example.texts[0])
    sides = [{example.texts[0] for example in part} for part in splits.values()]
    assert sum(map(len, sides)) == 101
    # 101 premises, 80 % of them: standard error 4; five of them
    assert abs(len(sides[0]) - 81) < 20


def test_own_texts_bring_their_classes(tmp_path):
    (tmp_path / "train.tsv").write_text(
        "label\tbody\ttitle\n" + "".join(f"{'zab'[i % 3]}\tb {i}\tt {i}\n" for i in range(60))
    )
    read = load("own", tmp_path)
    assert read.class_names == ("a", "b", "z")
    assert all(len(example.texts) == 2 for example in read.splits["train"])
    labels = {example.texts: example.label for part in read.splits.values() for example in part}
    assert labels["b 0", "t 0"] == 2
    assert read.note == "split 80/10/10 by text"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text\tclass\nA.\tx\n", "line 1: columns must be 'label' and one or two columns of text, got"),
        ("text\tlabel\nA.\tx\nB.\tx\n", "must have at least two different labels, got"),
        ("text\tlabel\nA.\tx\nB.\n", "line 3: the row must have 2 fields .*, got 1"),
        ("text\tlabel\nA.\tx\nB.\t\n", "line 3: label must be one of 'x', 'y', got ''"),
        ("text\tlabel\nA.\tx\nB.\ty\tz\n", "3: the row must have 2 fields .*, got 3"),  # the only row of its class
    ],
)
def test_bad_file_of_ones_own_is_an_error(text, message, tmp_path):
    (tmp_path / "train.tsv").write_text(text + "".join(f"C {i}.\t{'xy'[i % 2]}\n" for i in range(40)) * ("line" in message))
    with pytest.raises(ValueError, match=message):
        load("own", tmp_path)


def test_label_of_the_dev_file_has_to_be_known(tmp_path):
    write_sentiment(tmp_path)
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nthe film\tmixed\n")
    with pytest.raises(ValueError, match=r"dev\.tsv, line 2: label must be one of 'bad', 'good', got 'mixed'"):
        load("own", tmp_path)


def hub_rows(count):
    return [{"sentence1": f"A {i}.", "sentence2": f"B {i}.", "label": i % 2, "idx": i} for i in range(count)]


def test_rows_with_named_fields_become_a_task():
    read = from_rows(TASKS["mrpc"], hub_rows(31), hub_rows(3))
    assert read.splits["test"][1] == Example(("A 1.", "B 1."), 1)
    assert {name: len(part) for name, part in read.splits.items()} == {"train": 28, "validation": 3, "test": 3}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"sentence1": "A.", "label": 0}, "row 0 lacks"),
        ({"sentence1": "A.", "sentence2": "B.", "label": -1}, "row 0: label must be from 0 to 1, got -1"),
        ({"sentence1": "", "sentence2": "B.", "label": 1}, "row 0: #1 String is empty"),
    ],
)
def test_bad_named_field_is_an_error(row, message):
    with pytest.raises(ValueError, match=message):
        from_rows(TASKS["mrpc"], [row], hub_rows(2))


def test_dataset_of_the_datasets_package_is_read():
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    train, test = datasets.Dataset.from_list(hub_rows(31)), datasets.Dataset.from_list(hub_rows(3))
    assert from_rows(TASKS["mrpc"], train, test) == from_rows(TASKS["mrpc"], hub_rows(31), hub_rows(3))


def test_source_datasets_asks_the_hub_for_the_task(monkeypatch):
    asked = []

    def load_dataset(*names):
        asked.append(names)
        return {"train": hub_rows(31), "validation": hub_rows(3)}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert len(load("mrpc", None, "datasets").splits["test"]) == 3
    assert asked == [("nyu-mll/glue", "mrpc")]


def test_source_datasets_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        load("mrpc", None, "datasets")


@needs_data
@pytest.mark.parametrize(
    ("name", "train", "dev"),
    [("cola", 8551, 1043), ("mrpc", 3668, 408), ("rte", 2490, 277), ("stsb", 5749, 1500), ("wnli", 635, 71)],
)
def test_official_files_have_their_official_counts(name, train, dev):
    splits = load(name, shared_data()).splits
    assert (len(splits["train"]) + len(splits["validation"]), len(splits["test"])) == (train, dev)


@needs_data
def test_subset_of_mnli_shares_no_premise_between_splits():
    read = load("mnli", shared_data())
    premises = [{example.texts[0] for example in part} for part in read.splits.values()]
    assert sum(map(len, premises)) == 24_081
    assert Counter(e.label for part in read.splits.values() for e in part) == {0: 7166, 1: 12_998, 2: 7128}
    assert "by premise" in read.note


@needs_data
def test_subset_of_qqp_shares_no_pair_between_splits():
    read = load("qqp", shared_data())
    pairs = [{frozenset(example.texts) for example in part} for part in read.splits.values()]
    assert not pairs[0] & (pairs[1] | pairs[2])
    assert not pairs[1] & pairs[2]
    assert sum(map(len, read.splits.values())) == 6493


def test_file_beside_its_place_as_xz_is_read(tmp_path):
    write_glue(tmp_path, {"WNLI/dev.tsv": GLUE["WNLI/dev.tsv"]})
    (tmp_path / "WNLI" / "train.tsv.xz").write_bytes(lzma.compress(GLUE["WNLI/train.tsv"].encode()))
    assert sum(map(len, load("wnli", tmp_path).splits.values())) == 3
    (tmp_path / "WNLI" / "train.tsv.xz").write_bytes(b"no xz")
    with pytest.raises(ValueError, match=r"train\.tsv\.xz cannot be decompressed"):
        load("wnli", tmp_path)


def test_every_share_of_the_documented_split_adds_up():
    assert sum(data.PARTS.values()) == pytest.approx(1.0)
