"""Translation data: strict reading, honest splits, tokens that give the text back, batches that fit."""

import gzip
import lzma

import pytest
import torch

from bayesattn_recipes.translation import data
from bayesattn_recipes.translation.batches import Corpus, encode_pairs, make_batch, token_batches
from bayesattn_recipes.translation.text import Pairs, decode_lines, read_lines, read_pairs, read_tab_separated
from bayesattn_recipes.translation.vocabulary import END, PAD, START, Vocabulary
from data import shared_data

FOLDER = shared_data()
needs_data = pytest.mark.skipif(FOLDER is None or not (FOLDER / "multi30k").is_dir(), reason="no Multi30k at hand")


def write(path, *lines):
    path.write_bytes(b"".join(line.encode() + b"\n" if isinstance(line, str) else line + b"\n" for line in lines))
    return path


def test_unequal_line_counts_are_named(tmp_path):
    german, english = write(tmp_path / "a.de", "x", "y"), write(tmp_path / "a.en", "x")
    with pytest.raises(ValueError, match=r"a\.de and .*a\.en must have the same number of lines, .*, got 2 and 1"):
        read_pairs(german, english)


def test_invalid_utf8_is_named_with_its_line(tmp_path):
    with pytest.raises(ValueError, match=r"a\.de, line 2 is not UTF-8: invalid start byte at byte 3"):
        read_lines(write(tmp_path / "a.de", "gut", b"ab\xff", "gut"))


@pytest.mark.parametrize("empty", ["", "  \t "])
def test_empty_line_is_named(tmp_path, empty):
    with pytest.raises(ValueError, match=r"a\.de, line 3 is empty. Every line must hold one sentence"):
        read_lines(write(tmp_path / "a.de", "gut", "gut", empty, "gut"))


def test_only_a_line_feed_ends_a_line():
    assert decode_lines("eins\u2028zwei\r\ndrei\u0085vier".encode(), "x") == ["eins\u2028zwei", "drei\u0085vier"]


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_files_may_be_compressed(tmp_path, suffix, pack):
    (tmp_path / f"train.de{suffix}").write_bytes(pack("Grüße\n".encode()))
    assert read_lines(data.find_file(tmp_path, "train.de")) == ["Grüße"]


def test_truncated_archive_is_named(tmp_path):
    (tmp_path / "a.xz").write_bytes(lzma.compress(b"gut\n" * 99)[:-20])
    with pytest.raises(ValueError, match=r"a\.xz cannot be unpacked"):
        read_lines(tmp_path / "a.xz")


def test_line_without_a_tab_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"deu\.txt, line 2 must have two columns, English, tab, German, got fewer"):
        read_tab_separated(write(tmp_path / "deu.txt", "Hi.\tHallo!", "Run!"))


@pytest.mark.parametrize(
    ("name", "folder", "message"),
    [
        ("nope", "", "dataset must be one of 'multi30k', 'tatoeba', 'iwslt14', got 'nope'"),
        ("multi30k", None, "multi30k needs data, the folder of the data sets"),
        ("multi30k", "nowhere", "data must be a folder, got"),
        ("multi30k", "", r"train\.de does not exist, plain or as \.gz or \.xz"),
        ("iwslt14", "", "iwslt14 is not a folder. It must hold the full IWSLT14 set"),
    ],
)
def test_missing_data_is_named(tmp_path, name, folder, message):
    with pytest.raises(ValueError, match=message):
        data.load_splits(name, None if folder is None else tmp_path / folder)


def test_full_iwslt14_is_read_from_its_official_files(tmp_path):
    place = tmp_path / "iwslt14"
    place.mkdir()
    for number, stem in enumerate(("train", "valid", "test")):
        write(place / f"{stem}.de", f"satz {number} .")
        write(place / f"{stem}.en", f"sentence {number} .")
    splits = data.load_splits("iwslt14", tmp_path)
    assert list(splits) == ["train", "validation", "test"]
    assert splits["validation"] == Pairs(["satz 1 ."], ["sentence 1 ."])


def chained_pairs(count):
    """Sentences in chains: English i has German i and i+1, unless i ends its chain of seven."""
    pairs = Pairs([], [])
    for i in range(count):
        for german in (i, i + 1) if (i + 1) % 7 else (i,):
            pairs.targets.append(f"English {i}")
            pairs.sources.append(f"Deutsch {german}")
    return pairs


def test_split_shares_no_sentence_of_either_language():
    splits = data.split_by_sentence(chained_pairs(2100), (200, 200))
    for side in range(2):
        sets = [set(pairs[side]) for pairs in splits.values()]
        assert all(sets)
        assert len(set.union(*sets)) == sum(map(len, sets))


def test_split_does_not_depend_on_the_order_of_the_file():
    pairs = chained_pairs(700)
    reversed_pairs = Pairs(pairs.sources[::-1], pairs.targets[::-1])
    first, second = data.split_by_sentence(pairs, (200, 200)), data.split_by_sentence(reversed_pairs, (200, 200))
    assert first == second
    assert data.split_hash(first) == data.split_hash(second)


def test_held_out_splits_have_every_source_once_and_repeats_count_once():
    pairs = chained_pairs(700)
    splits = data.split_by_sentence(Pairs(pairs.sources * 2, pairs.targets * 2), (200, 200))
    for name in ("validation", "test"):
        assert len(splits[name].sources) == len(set(splits[name].sources))
    assert splits == data.split_by_sentence(pairs, (200, 200))


def test_hash_sees_every_line_and_split():
    splits = {"train": Pairs(["a"], ["b"]), "test": Pairs(["c"], ["d"])}
    changed = [
        {"train": Pairs(["a"], ["B"]), "test": Pairs(["c"], ["d"])},
        {"test": Pairs(["a"], ["b"]), "train": Pairs(["c"], ["d"])},
    ]
    assert len({data.split_hash(found) for found in (splits, *changed)}) == 3


@needs_data
def test_multi30k_has_its_published_sizes():
    sizes = {name: len(pairs.sources) for name, pairs in data.load_splits("multi30k", FOLDER).items()}
    assert sizes == {
        "train": 29_000,
        "validation": 1014,
        "test-2016": 1000,
        "test-2017": 1000,
        "test-mscoco": 461,
        "test-2018": 1071,
    }


@pytest.mark.skipif(FOLDER is None or not (FOLDER / "tatoeba_deu_eng").is_dir(), reason="no Tatoeba at hand")
@pytest.mark.slow
def test_tatoeba_split_is_the_published_one():
    splits = data.load_splits("tatoeba", FOLDER)
    assert data.split_hash(splits) == "dca285bb7ad7c0a94396a1afa45611be53746a23fdadf40ef0afa62028eb96d0"


SENTENCES = ["Zwei junge Männer, draußen!", "A man isn't tall.", "Über 5 % – ja.", "zwei zwei Männer"]


def test_tokens_give_the_text_back():
    vocabulary = Vocabulary.learn(SENTENCES * 3, 60)
    assert [vocabulary.decode(tokens) for tokens in vocabulary.encode(SENTENCES)] == SENTENCES
    assert vocabulary.pieces[:4] == ["<pad>", "<unk>", "<s>", "</s>"]
    assert len(vocabulary) == len(vocabulary.pieces) <= 60


def test_lower_case_vocabulary_forgets_upper_case():
    vocabulary = Vocabulary.learn(SENTENCES * 3, 60, lowercase=True)
    assert vocabulary.decode(vocabulary.encode(["ZWEI Männer"])[0]) == "zwei männer"


def test_vocabulary_is_saved_and_read_back(tmp_path):
    vocabulary = Vocabulary.learn(SENTENCES * 3, 60)
    vocabulary.save(tmp_path)
    assert Vocabulary.load(tmp_path).encode(SENTENCES) == vocabulary.encode(SENTENCES)
    (tmp_path / "vocabulary.json").write_text("{}")
    with pytest.raises(ValueError, match=r"vocabulary\.json is not a vocabulary"):
        Vocabulary.load(tmp_path)
    with pytest.raises(ValueError, match=r"vocabulary\.json cannot be read"):
        Vocabulary.load(tmp_path / "nowhere")


def random_corpus(count=211):
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 30, (count, 2), generator=generator).tolist()
    return Corpus([[5] * s + [END] for s, _ in lengths], [[6] * t + [END] for _, t in lengths])


@pytest.mark.parametrize("pad_to", [1, 8])
def test_batches_hold_every_pair_once_and_fit(pad_to):
    corpus = random_corpus()
    batches = token_batches(corpus, 200, torch.Generator().manual_seed(1), pad_to=pad_to)
    assert sorted(torch.cat(batches).tolist()) == list(range(len(corpus.sources)))
    for indices in batches:
        chosen = indices.tolist()
        batch = make_batch([corpus.sources[i] for i in chosen], [corpus.targets[i] for i in chosen], pad_to=pad_to)
        for name in ("source", "target_out"):
            assert batch[name].numel() <= 200
            assert batch[name].shape[1] % pad_to == 0


def test_rounded_batches_have_the_same_few_shapes_in_every_epoch():
    corpus = random_corpus()

    def shapes(seed):
        found = set()
        for indices in token_batches(corpus, 200, torch.Generator().manual_seed(seed), pad_to=8):
            chosen = indices.tolist()
            batch = make_batch([corpus.sources[i] for i in chosen], [corpus.targets[i] for i in chosen], pad_to=8)
            found.add((tuple(batch["source"].shape), tuple(batch["target_in"].shape)))
        return found

    # four widths (8 to 32), each with full batches and one that is not
    assert shapes(0) == shapes(1)
    assert len(shapes(0)) <= 8


def test_batches_hold_similar_lengths():
    corpus = random_corpus()
    batches = token_batches(corpus, 200, torch.Generator().manual_seed(1))
    padding = 1.0 - sum(map(len, corpus.targets)) / sum(
        len(indices) * max(len(corpus.targets[i]) for i in indices.tolist()) for indices in batches
    )
    # batches drawn at random pad 40 to 50 % of these lengths
    assert padding < 0.15


def test_order_is_random_and_repeats_with_its_seed():
    corpus = random_corpus()
    first, again, other = (token_batches(corpus, 200, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert [b.tolist() for b in first] == [b.tolist() for b in again]
    assert [b.tolist() for b in first] != [b.tolist() for b in other]


def test_targets_are_shifted_by_one():
    batch = make_batch([[5, END], [6, 7, 8, END]], [[9, 10, END], [11, END]])
    assert batch["source"].tolist() == [[5, END, PAD, PAD], [6, 7, 8, END]]
    assert batch["target_in"].tolist() == [[START, 9, 10], [START, 11, PAD]]
    assert batch["target_out"].tolist() == [[9, 10, END], [11, END, PAD]]
    assert (batch["source_lengths"], batch["target_lengths"]) == ([2, 4], [3, 2])


def test_long_training_pairs_are_left_out():
    vocabulary = Vocabulary.learn(["a b c d"], 20)
    pairs = Pairs(["a", "a b c d", "a b"], ["a", "a", "a b c d"])
    assert len(encode_pairs(pairs, vocabulary, 3).sources) == 1
    assert len(encode_pairs(pairs, vocabulary).sources) == 3
