"""What the vision recipes share: regions with masks, pictures, ids that fit or raise, the world of shapes, overlays."""

import io
import lzma
import sys
import tarfile
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bayesattn.cli import main
from bayesattn.files import write_tensors
from bayesattn_recipes.vision.extract import extract_folder, grid_features
from bayesattn_recipes.vision.features import (
    H5Regions,
    NpzFolder,
    StoredRegions,
    add_noise,
    load_grid_features,
    read_regions,
    write_regions,
)
from bayesattn_recipes.vision.ids import find_name, positions
from bayesattn_recipes.vision.images import ImageSource, read_image
from bayesattn_recipes.vision.overlay import plot_overlay
from bayesattn_recipes.vision.shapes import COLORS, GRID, HUES, color_shares, make_shapes_world, pixel_features
from data import shared_data
from helpers import STANDARD_ERRORS


@pytest.fixture(scope="module")
def world():
    return make_shapes_world(60, seed=7)


def jpeg(width: int = 13, height: int = 11) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "jpeg")
    return buffer.getvalue()


def write_tar(path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def test_positions_pair_names_whatever_their_order():
    assert positions(["c", "a", "c"], ["a", "b", "c"], what="captions", where="features").tolist() == [2, 0, 2]


def test_names_that_are_missing_from_the_features_are_listed():
    with pytest.raises(ValueError, match=r"2 of 3 images of the questions are missing from the features: 'x', 'y'"):
        positions(["a", "x", "y", "x"], ["a", "b"], what="questions", where="features")


def test_name_that_occurs_twice_is_refused():
    with pytest.raises(ValueError, match=r"must name each image once, but 1 names occur twice. The first is 'b'"):
        positions(["a"], ["a", "b", "b"], what="questions", where="features")


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("dog.jpg", "dog.jpg"),
        ("image12.jpg", "image12"),
        ("COCO_val2014_000000000042.jpg", "42"),
        ("COCO_train2014_000000100042.jpg", None),
        ("42.jpg", "42"),
        ("photo_42.jpg", None),
    ],
)
def test_one_image_is_found_by_its_file_name_or_by_cocos_number(image, name):
    assert find_name(image, ["dog.jpg", "image12", "42"]) == name


def test_quantised_grid_features_are_read_as_they_were_written(tmp_path):
    rng = np.random.default_rng(1)
    stored = rng.integers(-127, 127, (5, 3, 6), dtype=np.int8)
    step = rng.random(5).astype(np.float32)
    np.savez(tmp_path / "net_2x3_pca5_meta.npz", names=np.array(["a", "b", "c"]), step=step)
    with lzma.open(tmp_path / "net_2x3_pca5_int8.npy.xz", "wb") as file:
        np.save(file, stored)
    regions = load_grid_features(tmp_path / "net_2x3_pca5")
    values, mask = regions.gather(torch.tensor([2, 0]))
    assert (regions.names, regions.grid, regions.dim) == (["a", "b", "c"], (2, 3), 5)
    assert bool(mask.all())
    # one float32 product, in the same order
    np.testing.assert_array_equal(values.numpy(), (stored * step[:, None, None]).transpose(1, 2, 0)[[2, 0]])


def test_features_whose_names_do_not_fit_are_refused(tmp_path):
    np.savez(tmp_path / "net_2x3_meta.npz", names=np.array(["a", "b"]), step=np.ones(5, np.float32))
    with lzma.open(tmp_path / "net_2x3_int8.npy.xz", "wb") as file:
        np.save(file, np.zeros((5, 3, 6), np.int8))
    with pytest.raises(ValueError, match=r"must have shape \(5, 2, regions\) of int8, got \(5, 3, 6\) of int8"):
        load_grid_features(tmp_path / "net_2x3")


def test_image_without_a_region_is_refused():
    mask = torch.tensor([[True, False], [False, False]])
    with pytest.raises(ValueError, match="every image must have at least one region, but these have none: 'b'"):
        StoredRegions(["a", "b"], torch.zeros(2, 2, 3), mask=mask)


def write_npz(folder, name: str, regions: int, channels: int = 4) -> np.ndarray:
    folder.mkdir(exist_ok=True)
    values = np.random.default_rng(regions).random((channels, regions)).astype(np.float32)
    boxes = np.tile(np.array([0.0, 0.0, 50.0, 20.0]), (regions, 1))
    np.savez(folder / f"{name}.npz", x=values, bbox=boxes, image_w=100, image_h=40)
    return values


def test_npz_features_come_with_a_mask_of_their_own_regions(tmp_path):
    first, second = write_npz(tmp_path, "one.jpg", 3), write_npz(tmp_path, "two.jpg", 5)
    regions = NpzFolder([tmp_path])
    values, mask = regions.gather(torch.tensor([0, 1]))
    assert mask.sum(dim=1).tolist() == [3, 5]
    np.testing.assert_array_equal(values[0, :3].numpy(), first.T)
    np.testing.assert_array_equal(values[1].numpy(), second.T)
    assert regions.boxes(0)[0].tolist() == [0.0, 0.0, 0.5, 0.5]


def test_npz_image_without_a_region_names_itself(tmp_path):
    write_npz(tmp_path, "empty.jpg", 0)
    write_npz(tmp_path, "full.jpg", 2)
    with pytest.raises(ValueError, match=r"every image must have at least one region, but 'empty.jpg' has none"):
        NpzFolder([tmp_path]).gather(torch.tensor([0, 1]))


def h5_file(monkeypatch, **datasets):
    """Let arrays stand in for the data sets of an HDF5 file, whose package is not always installed."""
    whole = {"image_ids": np.array([9, 5]), "image_features": np.arange(24, dtype=np.float32).reshape(2, 3, 4), **datasets}
    monkeypatch.setitem(sys.modules, "h5py", types.SimpleNamespace(File=lambda path, mode: whole))
    return Path("features.h5")


def test_h5_features_come_with_the_number_of_their_regions(monkeypatch):
    boxes = np.zeros((2, 3, 4))
    boxes[1, 0] = [0.0, 0.0, 0.5, 0.25]
    regions = H5Regions(h5_file(monkeypatch, num_boxes=np.array([3, 1]), boxes=boxes))
    values, mask = regions.gather(torch.tensor([1, 0, 1]))
    assert regions.names == ["9", "5"]
    assert mask.sum(dim=1).tolist() == [1, 3, 1]
    assert values[:, 0, 0].tolist() == [12.0, 0.0, 12.0]
    assert regions.boxes(1).tolist() == [[0.0, 0.0, 0.5, 0.25]]


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ({"num_boxes": np.array([3, 0])}, "every image must have at least one region, but '5' has none"),
        ({"num_boxes": np.array([4, 1])}, "num_boxes of '9' must be at most 3, got 4"),
        ({"image_ids": np.array([9, 5, 1])}, "3 ids for 2 images"),
        ({"image_features": np.zeros((2, 12))}, r"image_features must have shape .*, got \(2, 12\)"),
    ],
)
def test_h5_features_that_do_not_fit_are_refused(datasets, message, monkeypatch):
    with pytest.raises(ValueError, match=message):
        H5Regions(h5_file(monkeypatch, **datasets))


def test_h5_features_without_h5py_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ValueError, match="needs the package 'h5py'"):
        H5Regions(tmp_path / "features.h5")


def test_npz_image_with_two_files_is_refused(tmp_path):
    write_npz(tmp_path, "one.jpg", 3)
    write_npz(tmp_path / "sub", "one.jpg", 3)
    with pytest.raises(ValueError, match="have two files"):
        NpzFolder([tmp_path, tmp_path / "sub"])


def test_variance_is_that_of_existing_regions_averaged_over_channels():
    mask = torch.rand(70, 5) < 0.6
    mask[:, 0] = True
    values = torch.where(mask[..., None], torch.randn(70, 5, 3) * torch.tensor([1.0, 2.0, 3.0]) + 4.0, 1e6)
    regions = StoredRegions([str(index) for index in range(70)], values, mask=mask)
    # float64 sums of a few hundred numbers around ten
    assert regions.variance == pytest.approx(float(values[mask].double().var(dim=0, correction=0).mean()), rel=1e-9)


def test_own_features_are_read_back(tmp_path):
    values = torch.randn(2, 6, 5).half().float()
    write_regions(tmp_path / "mine.safetensors", ["a.jpg", "b.jpg"], values, (2, 3))
    regions = read_regions(tmp_path / "mine.safetensors")
    assert (regions.names, regions.grid) == (["a.jpg", "b.jpg"], (2, 3))
    assert torch.equal(regions.gather(torch.tensor([0, 1]))[0], values)


def test_feature_noise_has_the_variance_asked_for():
    noisy = add_noise(torch.zeros(7, 11, 1000), 5.0, torch.Generator().manual_seed(0))
    # the variance of n normal draws has standard error √(2/n) of itself
    assert abs(float(noisy.var()) / 5.0 - 1.0) < STANDARD_ERRORS * (2.0 / noisy.numel()) ** 0.5


@pytest.mark.parametrize("variance", [-1.0, float("inf"), float("nan")])
def test_impossible_noise_is_refused(variance):
    with pytest.raises(ValueError, match="variance must be a finite number of at least 0, got"):
        add_noise(torch.zeros(1, 1, 1), variance)


def test_images_are_read_from_a_tar_and_from_a_folder(tmp_path):
    content = jpeg()
    write_tar(tmp_path / "all.tar", {"sub/a.jpg": content, "notes.txt": b"no picture"})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.jpg").write_bytes(content)
    packed, loose = ImageSource(tmp_path / "all.tar"), ImageSource(tmp_path / "folder")
    assert packed.names == loose.names == ["a.jpg"]
    assert packed.read("a.jpg").shape == (11, 13, 3)
    assert torch.equal(packed.read("a.jpg"), loose.read("a.jpg"))


def test_missing_image_names_itself(tmp_path):
    write_tar(tmp_path / "all.tar", {"a.jpg": jpeg()})
    with pytest.raises(ValueError, match=r"image 'b.jpg' is not in .*all.tar, which has 1 images"):
        ImageSource(tmp_path / "all.tar").read("b.jpg")


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_corrupt_jpeg_is_a_clear_error_or_a_counted_skip(tmp_path, damage):
    whole = jpeg(64, 64)
    broken = {"truncated": whole[: len(whole) // 2], "garbage": b"\x00" * 500, "empty": b""}[damage]
    write_tar(tmp_path / "all.tar", {"a.jpg": jpeg(), "b.jpg": broken})
    source = ImageSource(tmp_path / "all.tar")
    with pytest.raises(ValueError, match=r"image 'b.jpg' of .* cannot be decoded: (?!.*0x)"):  # no address of an object
        source.read("b.jpg")
    assert list(source.unreadable(source.names)) == ["b.jpg"]


def test_tar_that_is_none_and_folder_without_images_are_refused(tmp_path):
    (tmp_path / "bad.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(ValueError, match="Give a folder or an uncompressed tar file"):
        ImageSource(tmp_path / "bad.tar")
    with pytest.raises(ValueError, match="holds no image"):
        ImageSource(tmp_path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_image(tmp_path / "nowhere.jpg")


def test_features_without_timm_say_what_to_install(tmp_path):
    (tmp_path / "a.jpg").write_bytes(jpeg())
    try:
        import timm  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(ValueError, match="needs the package 'timm'"):
            extract_folder(tmp_path, tmp_path / "out.safetensors")
        assert not (tmp_path / "out.safetensors").exists()
    else:
        pytest.skip("timm is installed")


class Cells(torch.nn.Module):
    """Stands in for a backbone: means of cells of 32 x 32 pixels, three channels."""

    def forward(self, pixels):
        return torch.nn.functional.avg_pool2d(pixels, 32)


@pytest.fixture
def fake_timm(monkeypatch):
    """A timm that makes `Cells` and keeps what it was asked for."""
    asked = []
    module = types.ModuleType("timm")
    module.create_model = lambda name, **options: asked.append((name, options)) or Cells()
    monkeypatch.setitem(sys.modules, "timm", module)
    return asked


def call_features(*arguments) -> int:
    with pytest.raises(SystemExit) as exited:
        main(["features", *map(str, arguments)])
    return exited.value.code


def test_features_command_writes_the_cells_of_every_picture_and_counts_broken_ones(tmp_path, fake_timm, capsys):
    (tmp_path / "photos").mkdir()
    bright = np.zeros((40, 60, 3), dtype=np.uint8)
    bright[:20, :30] = 255
    Image.fromarray(bright).save(tmp_path / "photos" / "b.png")
    (tmp_path / "photos" / "a.jpg").write_bytes(jpeg())
    (tmp_path / "photos" / "c.jpg").write_bytes(jpeg()[:50])
    out, weights = tmp_path / "out.safetensors", tmp_path / "weights.safetensors"
    weights.touch()
    arguments = (tmp_path / "photos", "--out", out, "--size", "64x96", "--weights", weights)
    assert call_features(*arguments) == 2
    assert "c.jpg cannot be decoded" in capsys.readouterr().err
    assert not out.exists()
    assert call_features(*arguments, "--skip-broken") == 0
    assert "features of 2 images, 1 left out" in " ".join(capsys.readouterr().out.split())
    found = read_regions(out)
    assert (found.names, found.grid, found.dim) == (["a.jpg", "b.png"], (2, 3), 3)
    values, _ = found.gather(torch.tensor([1]))
    # the upper left quarter is bright: all of the first cell, half of the second, nothing of the lower row
    shares = (values[0].mean(dim=1) - values[0, 5].mean()) / (values[0, 0] - values[0, 5]).mean()
    # half precision, and an antialiased border a few pixels wide
    assert torch.allclose(shares, torch.tensor([1.0, 0.5, 0.0, 0.0, 0.0, 0.0]), atol=0.05)
    name, options = fake_timm[-1]
    assert name == "resnet50"
    assert options["pretrained_cfg_overlay"] == {"file": str(weights)}


def test_projected_features_have_the_grid_and_components_of_the_file_that_names_them(tmp_path, fake_timm):
    (tmp_path / "a.jpg").write_bytes(jpeg())
    mean, basis = np.array([0.5, -1.0, 2.0]), np.array([[0.6, 0.8, 0.0], [0.0, 0.0, 1.0]])
    meta = tmp_path / "resnet50_3x5_pca2_meta.npz"
    np.savez(meta, mean=mean, components=basis)
    extract_folder(tmp_path, tmp_path / "out.safetensors", project=meta)
    found = read_regions(tmp_path / "out.safetensors")
    assert found.grid == (3, 5)
    plain, _ = grid_features(Cells(), read_image(tmp_path / "a.jpg"), (96, 160))
    expected = (plain - torch.tensor(mean).float()) @ torch.tensor(basis).float().T
    # stored in half precision: 11 bits
    assert torch.allclose(found.gather(torch.tensor([0]))[0][0], expected, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match=r"grid of \(2, 2\), but .* has one of \(3, 5\)"):
        extract_folder(tmp_path, tmp_path / "other.safetensors", project=meta, size=(64, 64))
    assert not (tmp_path / "other.safetensors").exists()


@pytest.mark.parametrize("size", ["224", "axb", "0x5", "-3x4"])
def test_impossible_sizes_of_pictures_are_one_line(size, tmp_path, fake_timm, capsys):
    (tmp_path / "a.jpg").write_bytes(jpeg())
    assert call_features(tmp_path, "--out", tmp_path / "f.safetensors", f"--size={size}") == 2
    error = capsys.readouterr().err
    assert "size must be" in error
    assert error.count("\n") == 1


def test_timm_backbone_with_weights_from_a_file_gives_its_last_feature_map(tmp_path):
    timm = pytest.importorskip("timm", reason="timm is not installed")
    torch.manual_seed(3)
    model = timm.create_model("resnet18", pretrained=False, num_classes=0, global_pool="").eval()
    weights = tmp_path / "weights.safetensors"
    write_tensors(weights, model.state_dict())
    (tmp_path / "a.jpg").write_bytes(jpeg(61, 47))
    extract_folder(tmp_path, tmp_path / "out.safetensors", backbone="resnet18", weights=weights, size=(64, 96))
    found = read_regions(tmp_path / "out.safetensors")
    expected, grid = grid_features(model, read_image(tmp_path / "a.jpg"), (64, 96))
    assert (found.grid, found.dim, grid) == ((2, 3), 512, (2, 3))
    # half precision, and on a GPU other convolutions
    assert torch.allclose(found.gather(torch.tensor([0]))[0][0], expected, rtol=1e-2, atol=1e-2)


def test_cells_of_a_feature_map_are_read_row_by_row():
    class Backbone(torch.nn.Module):
        def forward(self, pixels):
            return torch.nn.functional.adaptive_avg_pool2d(pixels, (2, 3))

    image = torch.zeros(40, 60, 3, dtype=torch.uint8)
    image[:20, 40:] = 255  # the top right cell
    cells, grid = grid_features(Backbone(), image)
    assert grid == (2, 3)
    assert cells.shape == (6, 3)
    assert int(cells.sum(dim=1).argmax()) == 2


def test_shapes_world_depends_on_its_seed_alone(world):
    again, other = make_shapes_world(60, seed=7), make_shapes_world(60, seed=8)
    assert torch.equal(again.images, world.images)
    assert (again.questions, again.captions) == (world.questions, world.captions)
    assert not torch.equal(other.images, world.images)


def test_every_image_of_the_shapes_world_has_questions_and_five_captions(world):
    assert Counter(question.image for question in world.questions) == dict.fromkeys(world.names, 4)
    assert all(len(captions) == 5 for captions in world.captions)
    assert all(len(question.answers) == 10 for question in world.questions)


def test_annotators_disagree_about_ambiguous_hues_only():
    assert all(color_shares(hue).max() > 0.99 for hue in HUES.values())
    halfway = color_shares((HUES["green"] + HUES["blue"]) / 2)
    assert sorted(halfway.round(2)) == [0.0, 0.0, 0.5, 0.5]


def test_answers_follow_the_scene(world):
    scenes = dict(zip(world.names, world.scenes))
    checked = 0
    for question in world.questions:
        if question.kind == "number":
            noun = question.text.split()[2].removesuffix("s")
            count = sum(noun in ("shape", shape.kind) for shape in scenes[question.image])
            said = Counter(question.answers).most_common(1)[0][0]
            # at most 12 % of the annotators slip: 5 or more of 10 slipping has probability below 0.004
            checked += said == str(count)
        elif question.kind == "color":
            assert set(question.answers) <= set(COLORS)
    assert checked >= 0.95 * sum(question.kind == "number" for question in world.questions)


def test_pixel_features_show_which_cells_hold_a_shape(world):
    colors = pixel_features(world.images)[..., :-2].abs().mean(dim=2)
    for scene, row in zip(world.scenes, colors):
        filled = {shape.row * GRID[1] + shape.column for shape in scene}
        assert {int(index) for index in row.topk(len(filled)).indices} == filled


def test_overlay_draws_the_image_and_every_map_once(world):
    maps = {"mean": torch.rand(1, 16), "prior": torch.rand(1, 16), "std": torch.rand(1, 16)}
    figure = plot_overlay(world.images[0], maps, grid=GRID, title="a question that costs $5?")
    titles = [ax.get_title() for ax in figure.axes if ax.get_title()]
    assert titles == ["image", "prior Ψ", "mean of W", "standard deviation of W"]


def test_overlay_by_word_has_a_column_for_every_word_and_one_prior(world):
    words = ["a", "red", "circle", "left", "of", "a", "blue", "square", "near", "the", "top"]
    maps = {"prior": torch.rand(1, 16), "mean": torch.rand(11, 16), "std": torch.rand(11, 16)}
    figure = plot_overlay(world.images[0], maps, grid=GRID, columns=words)
    titles = [ax.get_title() for ax in figure.axes if ax.get_title()]
    assert sorted(titles) == sorted(["image", "prior Ψ", *words])


def test_overlay_is_brightest_over_the_region_with_the_weight():
    from bayesattn.plots.overlay import blend

    weights = torch.zeros(6)
    weights[4] = 1.0  # second row, middle column
    over = blend(torch.zeros(20, 30, 3, dtype=torch.uint8), weights, grid=(2, 3))
    row, column = np.unravel_index(over.sum(axis=2).argmax(), (20, 30))
    assert 10 <= row < 20
    assert 10 <= column < 20
    boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.5, 0.5, 1.0, 1.0]])
    figure = plot_overlay(torch.zeros(20, 30, 3, dtype=torch.uint8), {"mean": torch.tensor([[0.1, 0.9]])}, boxes=boxes)
    over = figure.axes[1].images[0].get_array()
    assert over[19, 29].sum() > over[0, 0].sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": (3, 5)}, r"map 'mean' must have shape \(steps, 15\), one weight per region, got \(1, 16\)"),
        ({}, "give either grid or boxes, got neither"),
        ({"grid": (4, 4), "columns": ["a", "b"]}, "columns must have 1 entries, got 2"),
    ],
)
def test_overlay_refuses_maps_that_do_not_fit(options, message, world):
    with pytest.raises(ValueError, match=message):
        plot_overlay(world.images[0], {"mean": torch.rand(1, 16)}, **options)


@pytest.mark.skipif(shared_data() is None, reason="no shared data")
def test_shared_features_and_images_have_the_same_names():
    folder = shared_data() / "daquar"
    regions = load_grid_features(folder / "resnet50_7x9_pca512")
    assert (len(regions), regions.grid, regions.dim) == (1449, (7, 9), 512)
    photos = {name.removesuffix(".jpg") for name in ImageSource(folder / "images_280x212_q80.tar").names}
    assert photos == {name.removesuffix(".png") for name in regions.names}
