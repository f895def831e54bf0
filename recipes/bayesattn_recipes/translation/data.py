"""The data sets: Multi30k, Tatoeba with its own split, IWSLT14; all German to English.

DATA/multi30k/task1_raw/{train,val,test_2016_flickr,…}.{de,en}[.gz]     29,000 captions of photographs, as published
DATA/tatoeba_deu_eng/deu.txt[.xz]                                        169,197 everyday sentences, no official split
DATA/iwslt14/{train,valid,test}.{de,en}[.gz|.xz]                         talks; the full set, if you have it
DATA/iwslt14_de_en_valid_test/{valid,test}.{de,en}[.xz]                  only its validation and test parts
"""

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from bayesattn_recipes.common.sources import explained
from bayesattn_recipes.translation.text import Pairs, find_file, read_pairs, read_tab_separated

MULTI30K = {
    "train": "train",
    "validation": "val",
    "test-2016": "test_2016_flickr",
    "test-2017": "test_2017_flickr",
    "test-mscoco": "test_2017_mscoco",
    "test-2018": "test_2018_flickr",
}
IWSLT14 = {"train": "train", "validation": "valid", "test": "test"}
# a domain different from both training sets, tokenized and lower-cased by its makers
OUT_OF_DOMAIN = "iwslt14-test"

# groups of sentences, out of 1,000, held out for validation and for the test
TATOEBA_SHARES = (20, 20)


@lru_cache(maxsize=2)
def load_splits(name: str, folder: Path | None) -> dict[str, Pairs]:
    """Return the splits of a data set by name: `train`, `validation`, and one or more tests, the main one first.

    Args:
        name: `multi30k`, `tatoeba` or `iwslt14`.
        folder: Folder of the data sets.
    """
    if name not in LOADERS:
        raise ValueError(f"dataset must be one of {', '.join(map(repr, LOADERS))}, got {name!r}")
    with explained(name, folder):
        if folder is None:
            raise ValueError(f"{name} needs data, the folder of the data sets. Give it with --data or BAYESATTN_DATA")
        if not folder.is_dir():
            raise ValueError(f"data must be a folder, got {str(folder)!r}")
        return LOADERS[name](folder)


def load_out_of_domain(folder: Path) -> Pairs | None:
    """Return the IWSLT14 test set, or None if it is not available."""
    place = folder / "iwslt14_de_en_valid_test"
    return _read(place, "test") if place.is_dir() else None


def _read(place: Path, stem: str) -> Pairs:
    return read_pairs(find_file(place, f"{stem}.de"), find_file(place, f"{stem}.en"))


def _load_multi30k(folder: Path) -> dict[str, Pairs]:
    return {split: _read(folder / "multi30k" / "task1_raw", stem) for split, stem in MULTI30K.items()}


def _load_iwslt14(folder: Path) -> dict[str, Pairs]:
    place = folder / "iwslt14"
    if not place.is_dir():
        raise ValueError(
            f"{place} is not a folder. It must hold the full IWSLT14 set as train, valid and test in .de and .en (its "
            "validation and test part alone cannot be trained on)"
        )
    return {split: _read(place, stem) for split, stem in IWSLT14.items()}


def _load_tatoeba(folder: Path) -> dict[str, Pairs]:
    return split_by_sentence(read_tab_separated(find_file(folder / "tatoeba_deu_eng", "deu.txt")))


def split_by_sentence(pairs: Pairs, shares: tuple[int, int] = TATOEBA_SHARES) -> dict[str, Pairs]:
    """Split pairs so that no sentence of either language is in two splits.

    Sentences that are connected by pairs (one English sentence has several translations, and they have others) form a
    group and stay together. The SHA-256 of a group's first English sentence decides its split, which thus depends on
    the sentences alone, not on their order or on a random number. Held-out splits keep one pair of every German
    sentence.

    Args:
        pairs: Sentences and translations; repeated pairs count once.
        shares: Numbers of groups, out of 1,000, that go to validation and to test.
    """
    rows = sorted(set(zip(pairs.targets, pairs.sources, strict=True)))
    group = _connected(rows)
    splits: dict[str, list[tuple[str, str]]] = {"train": [], "validation": [], "test": []}
    # rows are sorted, so the first English sentence of a group is its first row's
    first: dict[int, str] = {}
    for row, number in zip(rows, group, strict=True):
        digest = hashlib.sha256(first.setdefault(number, row[0]).encode()).digest()
        place = int.from_bytes(digest[:8], "big") % 1000
        name = "validation" if place < shares[0] else "test" if place < sum(shares) else "train"
        splits[name].append(row)
    for name in ("validation", "test"):
        splits[name] = list({german: (english, german) for english, german in reversed(splits[name])}.values())[::-1]
    return {name: Pairs([row[1] for row in found], [row[0] for row in found]) for name, found in splits.items()}


def _connected(rows: list[tuple[str, str]]) -> list[int]:
    """Return, for every pair, the number of its group: pairs that share a sentence, directly or through others."""
    parent: list[int] = []
    number: dict[tuple[int, str], int] = {}

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for row in rows:
        ends = []
        for side, sentence in enumerate(row):
            node = number.setdefault((side, sentence), len(parent))
            if node == len(parent):
                parent.append(node)
            ends.append(root(node))
        parent[max(ends)] = min(ends)
    return [root(number[0, english]) for english, _ in rows]


def split_hash(splits: dict[str, Pairs]) -> str:
    """Return the SHA-256 of all splits with their names and lines, to identify the split behind a number."""
    digest = hashlib.sha256()
    for name in sorted(splits):
        digest.update(f"[{name}]\n".encode())
        for source, target in zip(*splits[name], strict=True):
            digest.update(f"{source}\t{target}\n".encode())
    return digest.hexdigest()


LOADERS: dict[str, Callable[[Path], dict[str, Pairs]]] = {
    "multi30k": _load_multi30k,
    "tatoeba": _load_tatoeba,
    "iwslt14": _load_iwslt14,
}
