"""Data that are not there: the error says where they come from and how they are laid out, for every recipe."""

import pytest

from bayesattn_recipes import RECIPES
from bayesattn_recipes.captioning.data import load_data as load_captions
from bayesattn_recipes.common import sources
from bayesattn_recipes.graph.data import DATASETS, load_graph
from bayesattn_recipes.language.data import load as load_texts
from bayesattn_recipes.language.model import find_encoder
from bayesattn_recipes.language.squad import load as load_questions
from bayesattn_recipes.language.tasks import find_task
from bayesattn_recipes.translation.data import LOADERS, load_splits
from bayesattn_recipes.vqa.data import DataConfig
from bayesattn_recipes.vqa.data import load_splits as load_vqa

# recipe, what is read, where it comes from, a file of its layout; digits reads none
CASES = [
    *(("graph", lambda data, n=name: load_graph(n, data), sources.SOURCES[name].origin, name) for name in DATASETS),
    ("language", lambda data: load_texts("mrpc", data), "https://gluebenchmark.com/tasks", "DATA/glue/TASK/train.tsv"),
    (
        "language", lambda data: load_questions(find_task("squad2"), data), "https://rajpurkar.github.io/SQuAD-explorer",
        "DATA/squad/dev-vVERSION.json",
    ),
    ("language", lambda data: load_texts("own", data), "the column label", "train.tsv"),
    ("language", lambda data: find_encoder("e5-small", data), "https://huggingface.co", "DATA/encoder_e5_small_hf/"),
    *(("translation", lambda data, n=name: load_splits(n, data), sources.SOURCES[name].origin, name) for name in LOADERS),
    *(
        ("captioning", lambda data, n=name: load_captions(n, data), sources.SOURCES[name].origin, f"DATA/{name}/")
        for name in ("flickr8k", "coco")
    ),
    *(
        ("vqa", lambda data, n=name: load_vqa(DataConfig(dataset=n), data), sources.SOURCES[name].origin, f"DATA/{name}/")
        for name in ("daquar", "vqa2")
    ),
]  # fmt: skip


@pytest.mark.parametrize("place", [None, "nowhere", ""])
@pytest.mark.parametrize(("recipe", "load", "origin", "file"), CASES)
def test_missing_data_say_where_they_come_from_and_how_they_are_laid_out(recipe, load, origin, file, place, tmp_path):
    refused = r"needs data|\Adata|does not exist|cannot be read|not a folder|not found|must hold|holds neither|encoder"
    with pytest.raises(ValueError, match=refused) as found:
        load(None if place is None else tmp_path / place)
    assert origin in str(found.value)
    assert file in str(found.value)


def test_every_recipe_that_reads_files_has_a_case():
    assert {recipe for recipe, *_ in CASES} == RECIPES.keys() - {"digits"}


def test_files_that_are_there_but_broken_are_not_explained_away(tmp_path):
    folder = tmp_path / "tatoeba_deu_eng"
    folder.mkdir()
    (folder / "deu.txt").write_text("no tab\n")
    with pytest.raises(ValueError, match=r"line 1 must have two columns, English, tab, German, got fewer$"):
        load_splits("tatoeba", tmp_path)
