"""Captions and features from files: official formats, strict pairing by name, and an error for everything else."""

import io
import json
import lzma
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from bayesattn_recipes.captioning import data as captioning_data
from bayesattn_recipes.captioning.batches import encode_captions, make_batch
from bayesattn_recipes.captioning.data import SPLITS, CaptionSplit, load_data, read_token_file
from bayesattn_recipes.captioning.explain import find_subject
from bayesattn_recipes.captioning.train import CaptioningExperiment, load_config
from bayesattn_recipes.captioning.vocabulary import BOUNDARY, UNKNOWN, Vocabulary
from bayesattn_recipes.vision.features import StoredRegions
from data import shared_data

NAMES = {"train": ["one.jpg", "two.jpg", "three.jpg"], "validation": ["four.jpg"], "test": ["five.jpg"]}
EVERY = [name for split in SPLITS for name in NAMES[split]]
REGIONS, CHANNELS = 6, 5  # a grid of 2 × 3


def write_features(folder, names=EVERY):
    stored = np.arange(CHANNELS * len(names) * REGIONS).reshape(CHANNELS, len(names), REGIONS) % 100
    np.savez(folder / "net_2x3_pca5_meta.npz", names=np.array(names), step=np.full(CHANNELS, 0.5, np.float16))
    content = io.BytesIO()
    np.save(content, stored.astype(np.int8))
    (folder / "net_2x3_pca5_int8.npy.xz").write_bytes(lzma.compress(content.getvalue()))
    return stored


def write_flickr8k(root):
    folder = root / "flickr8k"
    folder.mkdir()
    # numbers out of order, and captions of an image that no list names, as in the original file
    lines = [f"{name}#{number}\tPicture {number} of {name[:-4]} ." for name in EVERY for number in (1, 0)]
    lines.append("nobody.jpg.1#0\tA caption of a missing image .")
    (folder / "Flickr8k.token.txt").write_text("\n".join(lines) + "\n")
    for split, word in zip(SPLITS, ("train", "dev", "test")):
        (folder / f"Flickr_8k.{word}Images.txt").write_text("\n".join(NAMES[split]) + "\n")
    write_features(folder)
    with tarfile.open(folder / "images_8x8.tar", "w") as archive:
        for shade, name in enumerate(EVERY):
            content = io.BytesIO()
            Image.new("RGB", (8, 8), (40 * shade, 0, 0)).save(content, "PNG")
            member = tarfile.TarInfo(name)
            member.size = content.tell()
            content.seek(0)
            archive.addfile(member, content)
    return folder


def write_coco(root, split_of=("train", "restval", "train", "val", "test")):
    folder = root / "coco"
    (folder / "cocobu_att").mkdir(parents=True)
    images = [
        {"cocoid": 100 + row, "split": split, "filename": "x.jpg", "sentences": [{"raw": f"Thing {row}.", "tokens": []}]}
        for row, split in enumerate(split_of)
    ]
    (folder / "dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))
    for row in range(len(split_of)):
        np.savez(folder / "cocobu_att" / f"{100 + row}.npz", feat=np.full((1 + row, CHANNELS), row, np.float32))
    return folder


def test_flickr8k_pairs_captions_and_features_by_name(tmp_path):
    folder = write_flickr8k(tmp_path)
    # in another order than the lists: position must not matter
    stored = write_features(folder, EVERY[::-1])
    data = load_data("flickr8k", tmp_path)
    assert {name: data.splits[name].names for name in SPLITS} == NAMES
    assert data.splits["train"].captions[1] == ["Picture 0 of two .", "Picture 1 of two ."]
    values, mask = data.regions.gather(data.splits["validation"].rows)
    assert torch.equal(values[0], torch.from_numpy(stored[:, EVERY[::-1].index("four.jpg")].T * 0.5).float())
    assert mask.all()
    assert data.regions.grid == (2, 3)
    assert int(data.picture("three.jpg")[0, 0, 0]) == 80


def test_compressed_token_file_is_read_too(tmp_path):
    folder = write_flickr8k(tmp_path)
    plain = folder / "Flickr8k.token.txt"
    (folder / "Flickr8k.token.txt.xz").write_bytes(lzma.compress(plain.read_bytes()))
    before = read_token_file(plain)
    assert read_token_file(folder / "Flickr8k.token.txt.xz") == before


def test_coco_joins_restval_to_train_and_reads_any_number_of_boxes(tmp_path):
    write_coco(tmp_path)
    data = load_data("coco", tmp_path)
    assert {name: split.names for name, split in data.splits.items()} == {
        "train": ["100", "101", "102"],
        "validation": ["103"],
        "test": ["104"],
    }
    assert data.splits["test"].captions == [["Thing 4."]]
    values, mask = data.regions.gather(data.splits["train"].rows)
    assert values.shape == (3, 3, CHANNELS)
    assert mask.sum(dim=1).tolist() == [1, 2, 3]
    assert values[2].unique().tolist() == [2.0]


def test_photo_of_coco_is_found_by_the_number_in_its_file_name(tmp_path):
    folder = write_coco(tmp_path)
    (folder / "images").mkdir()
    Image.new("RGB", (8, 6), (40, 0, 0)).save(folder / "images" / "COCO_val2014_000000000104.jpg")
    subject = find_subject(load_config("coco-wc"), "COCO_val2014_000000000104.jpg", tmp_path)
    assert subject.picture.shape == (6, 8, 3)
    assert subject.regions.shape == (5, CHANNELS)
    assert bool((subject.regions == 4.0).all())


def test_shapes_need_no_file_and_share_no_image_between_splits():
    data = captioning_data.generate_shapes((5, 3, 2), seed=1)
    assert [len(data.splits[name]) for name in SPLITS] == [5, 3, 2]
    assert len({name for split in data.splits.values() for name in split.names}) == 10
    assert all(len(captions) == 5 for split in data.splits.values() for captions in split.captions)
    assert data.picture(data.splits["test"].names[0]).shape[-1] == 3


def break_token_line(folder):
    path = folder / "Flickr8k.token.txt"
    path.write_text(path.read_text() + "no tab here\n")


def repeat_caption(folder):
    path = folder / "Flickr8k.token.txt"
    path.write_text(path.read_text() + "one.jpg#0\tAgain .\n")


def silence_image(folder):
    path = folder / "Flickr8k.token.txt"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("two")))


def overlap_splits(folder):
    (folder / "Flickr_8k.testImages.txt").write_text("one.jpg\n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: write_features(folder, ["other.jpg", *EVERY[1:]]), "missing from the features: 'one.jpg'"),
        (lambda folder: write_features(folder, [*EVERY, "one.jpg"]), "must name each image once, .* The first is 'one.jpg'"),
        (silence_image, "1 images of the train split have no caption. The first is 'two.jpg'"),
        (overlap_splits, "'one.jpg' is listed twice"),
        (break_token_line, "line 12 must be NAME#NUMBER, a tab and a sentence, got 'no tab here'"),
        (repeat_caption, "caption 0 of 'one.jpg' occurs twice"),
        (
            lambda folder: (folder / "Flickr_8k.devImages.txt").write_text(""),
            "validation split must list at least one image, got none",
        ),
        (lambda folder: (folder / "Flickr_8k.devImages.txt").unlink(), "devImages.txt cannot be read"),
        (lambda folder: (folder / "Flickr8k.token.txt").unlink(), "holds neither Flickr8k.token.txt nor"),
        (lambda folder: (folder / "net_2x3_pca5_meta.npz").unlink(), "must hold one set of features .*, got 0"),
        (lambda folder: (folder / "net_2x3_pca5_int8.npy.xz").write_bytes(b"no xz"), "cannot be read"),
    ],
)
def test_damaged_flickr8k_is_refused(damage, message, tmp_path):
    folder = write_flickr8k(tmp_path)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load_data("flickr8k", tmp_path)


def read_first_batch(root):
    data = load_data("coco", root)
    return data.regions.gather(data.splits["train"].rows)


def empty_boxes(folder):
    np.savez(folder / "cocobu_att" / "101.npz", feat=np.zeros((0, CHANNELS), np.float32))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "dataset_coco.json").write_text("{"), "is not Karpathy's split of COCO"),
        (lambda folder: (folder / "dataset_coco.json").write_text('{"images": [{}]}'), "KeyError: 'cocoid'"),
        (lambda folder: (folder / "cocobu_att" / "101.npz").unlink(), "missing from the features: '101'"),
        (empty_boxes, "every image must have at least one region, but '101' has none"),
        (lambda folder: (folder / "cocobu_att" / "101.npz").write_bytes(b"PK"), "101.npz cannot be read"),
        (
            lambda folder: np.savez(folder / "cocobu_att" / "101.npz", x=np.zeros((2, 2))),
            "lacks 'feat'. It must be an npz file with feat",
        ),
    ],
)
def test_damaged_coco_is_refused(damage, message, tmp_path):
    damage(write_coco(tmp_path))
    with pytest.raises(ValueError, match=message):
        read_first_batch(tmp_path)


def test_missing_and_corrupt_pictures_are_named(tmp_path):
    folder = write_flickr8k(tmp_path)
    (folder / "images_8x8.tar").unlink()
    assert load_data("flickr8k", tmp_path).images is None
    with pytest.raises(ValueError, match=r"image 'one.jpg' is neither a file nor one of the data set's 0 pictures"):
        load_data("flickr8k", tmp_path).picture("one.jpg")
    (folder / "images").mkdir()
    (folder / "images" / "one.jpg").write_bytes(b"\xff\xd8\xff\xe0 not a whole JPEG")
    data = load_data("flickr8k", tmp_path)
    with pytest.raises(ValueError, match=r"one.jpg cannot be decoded"):
        data.picture("one.jpg")
    with pytest.raises(ValueError, match=r"image 'two.jpg' is not in"):
        data.picture("two.jpg")


@pytest.mark.parametrize("name", ["flickr8k", "coco"])
def test_data_folder_is_asked_for_where_it_is_needed(name):
    with pytest.raises(ValueError, match=f"{name} needs data, the folder .*--data"):
        load_data(name, None)


def test_generated_data_take_no_notice_of_a_folder(tmp_path):
    assert load_data("shapes", tmp_path).splits.keys() == load_data("shapes").splits.keys()


def split_of(*captions: list[str]) -> CaptionSplit:
    return CaptionSplit([str(row) for row in range(len(captions))], list(captions), torch.arange(len(captions)))


def test_captions_without_a_known_word_are_skipped_and_counted():
    vocabulary = Vocabulary.build(["a dog a dog"], 2)
    encoded = encode_captions(split_of(["A zebra", "Zebras!", "..."], ["dog"]), vocabulary, max_length=4)
    assert encoded.num_skipped == 2
    assert encoded.images.tolist() == [0, 1]
    assert encoded.words.tolist() == [[2, UNKNOWN, BOUNDARY], [3, BOUNDARY, BOUNDARY]]
    assert encoded.lengths.tolist() == [3, 2]
    with pytest.raises(ValueError, match="none of the 1 captions holds a known word"):
        encode_captions(split_of(["Zebras"]), vocabulary, max_length=4)


def test_batch_holds_each_image_once_and_its_words_in_place():
    data = captioning_data.generate_shapes((4, 1, 1), seed=3)
    split = data.splits["train"]
    vocabulary = Vocabulary.build((text for found in split.captions for text in found), 1)
    encoded = encode_captions(split, vocabulary, max_length=20)
    chosen = torch.tensor([17, 3, 16, 4])
    batch = make_batch(data, split, encoded, chosen)
    assert len(batch["regions"]) == 2
    said, starts = [], [0, *encoded.lengths[chosen].cumsum(0).tolist()]
    for row, caption in enumerate(chosen.tolist()):
        expected, _ = data.regions.gather(split.rows[[caption // 5]])
        assert torch.equal(batch["regions"][batch["image_rows"][row]], expected[0])
        said.append(" ".join(vocabulary.decode(batch["targets"][starts[row] : starts[row + 1]])))
        # what was said before each step is the caption one step later
        length = int(encoded.lengths[caption])
        assert batch["words"][row, 0] == BOUNDARY
        assert torch.equal(batch["words"][row, 1:length], encoded.words[caption, : length - 1])
    assert said == [split.captions[c // 5][c % 5].replace(" ,", "") for c in chosen.tolist()]


@pytest.fixture
def flickr8k(monkeypatch) -> captioning_data.CaptionData:
    root = shared_data()
    if root is None:
        pytest.skip("needs the shared data sets")

    def names_only(stem):
        # unpacking all features takes seconds and is tested with the features
        with np.load(f"{stem}_meta.npz") as meta:
            names = meta["names"].tolist()
        return StoredRegions(names, torch.zeros(len(names), 49, 1, dtype=torch.int8), grid=(7, 7))

    monkeypatch.setattr(captioning_data, "load_grid_features", names_only)
    return load_data("flickr8k", root)


def test_real_flickr8k_has_its_published_splits(flickr8k):
    assert [len(flickr8k.splits[name]) for name in SPLITS] == [6000, 1000, 1000]
    assert all(len(captions) == 5 for split in flickr8k.splits.values() for captions in split.captions)
    assert flickr8k.picture(flickr8k.splits["test"].names[0]).shape == (128, 128, 3)


def test_recorded_batches_of_real_flickr8k_have_one_shape(flickr8k):
    experiment = CaptioningExperiment(load_config("flickr8k-soft", ["width=2"]), flickr8k)
    batches = experiment.batches(experiment.config.training, torch.Generator().manual_seed(0))
    shapes = {tuple(tuple(x.shape) for x in experiment.pad(experiment.collate(found)).values()) for found in batches}
    assert shapes == {((50, 49, 1), (50, 49), (250, 21), (250,), (250,), (3285,), (3285,))}
    # words and ends of a batch, on average
    assert round(float(experiment.train.lengths.float().mean()) * 250) == 2935
