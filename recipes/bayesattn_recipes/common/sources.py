"""Where the data sets come from and which files a recipe reads, for the error when one is missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """A data set.

    Attributes:
        origin: Where to get it.
        files: The files to read, as patterns inside the data folder.
    """

    origin: str
    files: tuple[str, ...]

    def __str__(self) -> str:
        files = ", ".join(f"DATA/{name}" for name in self.files)
        return f"Get it from {self.origin} and lay it out as {files} (DATA is the folder given by --data)"


_KIMIYOUNG = "https://github.com/kimiyoung/planetoid (folder data)"
_PLANETOID = ("x", "y", "allx", "ally", "tx", "ty", "graph", "test.index")
_COCO_SPLITS = ("train2014", "val2014")
_YANDEX = "https://github.com/yandex-research/heterophilous-graphs (folder data)"
_GRID = "compute its grid features yourself, in the format of `load_grid_features` in bayesattn_recipes.vision.features"

SOURCES: dict[str, Source] = {
    **{
        name: Source(_KIMIYOUNG, tuple(f"planetoid/ind.{name}.{end}" for end in _PLANETOID))
        for name in ("cora", "citeseer", "pubmed")
    },
    **{
        name: Source(_YANDEX, (f"heterophilous_graphs/{name}.npz",))
        for name in ("actor", "chameleon_filtered", "squirrel_filtered", "minesweeper", "tolokers")
    },
    "glue": Source("https://gluebenchmark.com/tasks", ("glue/TASK/train.tsv", "glue/TASK/dev.tsv")),
    "squad": Source("https://rajpurkar.github.io/SQuAD-explorer", ("squad/train-vVERSION.json", "squad/dev-vVERSION.json")),
    "e5-small": Source("https://huggingface.co/intfloat/e5-small", ("encoder_e5_small_hf/",)),
    "multi30k": Source(
        "https://github.com/multi30k/dataset (folder data/task1/raw)",
        tuple(
            f"multi30k/task1_raw/{stem}.{language}*"
            for stem in ("train", "val", "test_2016_flickr", "test_2017_flickr", "test_2017_mscoco", "test_2018_flickr")
            for language in ("de", "en")
        ),
    ),
    "tatoeba": Source("https://www.manythings.org/anki (deu-eng.zip)", ("tatoeba_deu_eng/deu.txt*",)),
    "iwslt14": Source(
        "fairseq's examples/translation/prepare-iwslt14.sh",
        tuple(f"iwslt14/{split}.{language}*" for split in ("train", "valid", "test") for language in ("de", "en")),
    ),
    "flickr8k": Source(
        f"https://hockenmaier.cs.illinois.edu/8k-pictures.html ({_GRID})",
        (
            "flickr8k/Flickr8k.token.txt*",
            *(f"flickr8k/Flickr_8k.{split}Images.txt" for split in ("train", "dev", "test")),
            "flickr8k/*_meta.npz",
            "flickr8k/*_int8.npy.xz",
        ),
    ),
    "coco": Source(
        "https://cs.stanford.edu/people/karpathy/deepimagesent (caption_datasets.zip) and "
        "https://github.com/ruotianluo/self-critical.pytorch (bottom-up features)",
        ("coco/dataset_coco.json", "coco/cocobu_att/"),
    ),
    "daquar": Source(
        "https://www.mpi-inf.mpg.de/departments/computer-vision-and-machine-learning/research/vision-and-language/"
        f"visual-turing-challenge ({_GRID})",
        (
            "daquar/all_qa_pairs.txt",
            "daquar/train_images_list.txt",
            "daquar/test_images_list.txt",
            "daquar/resnet50_7x9_pca512_meta.npz",
            "daquar/resnet50_7x9_pca512_int8.npy.xz",
        ),
    ),
    "vqa2": Source(
        "https://visualqa.org/download.html and https://github.com/MILVLG/mcan-vqa (bottom-up features)",
        (
            *(f"vqa2/v2_OpenEnded_mscoco_{split}_questions.json" for split in _COCO_SPLITS),
            *(f"vqa2/v2_mscoco_{split}_annotations.json" for split in _COCO_SPLITS),
            "vqa2/features*",
        ),
    ),
}


@contextmanager
def explained(name: str, data: Path | None) -> Iterator[None]:
    """Read a data set; if that fails and files are missing, add where they come from and how they are laid out."""
    try:
        yield
    except (ValueError, OSError) as error:
        source = SOURCES[name]
        if data is not None and all(any(data.glob(pattern)) for pattern in source.files):
            raise
        raise ValueError(f"{error}. {source}") from None
