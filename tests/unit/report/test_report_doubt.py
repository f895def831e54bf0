"""Doubt in closed form on the page: what is kept in the file of predictions, refused there, and drawn from it."""

from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure
from report_runs import HOSTILE, WORDS, make_doubtful, make_run

from bayesattn.doubt import Uncertainty
from bayesattn.evaluation.report import figures
from bayesattn.evaluation.report.gather import group_runs, read_runs
from bayesattn.evaluation.runs import DoubtfulExamples, read_predictions
from bayesattn.files import RunError, read_tensors, write_tensors


def drawn_from(folders):
    return list(figures.doubtful_answers(group_runs(read_runs(folders)), "test"))


def test_file_gives_back_what_was_written(tmp_path):
    written = make_doubtful(WORDS)
    folder = make_run(tmp_path / "run", doubtful=written)
    found = read_predictions(folder).splits["test"].doubtful
    assert found.words == WORDS
    assert list(found.tensors()) == ["examples", "margin", "std", "by_token", "by_head"]
    assert all(torch.equal(value, written.tensors()[name]) for name, value in found.tensors().items())
    # heads that the second layer does not have
    assert found.by_head.shape == (4, 2, 3)
    assert torch.allclose(found.by_head.sum(dim=(1, 2)), found.std.square())
    assert not found.by_head[:, 1, 2].any()
    assert read_predictions(folder).splits["validation"].doubtful is None


def test_draws_have_no_parts():
    bare = Uncertainty(value=torch.ones(2), std=torch.ones(2), by_layer={}, by_head={}, by_token=None)
    with pytest.raises(ValueError, match="must have parts by token and head"):
        DoubtfulExamples.from_uncertainty(torch.arange(2), bare)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("examples", lambda x: x + 58, "examples .* of 61"),
        ("std", lambda x: x[:2].clone(), "shapes"),
        ("by_head", lambda x: x[:, 0].clone(), "shapes"),
        ("margin", lambda x: x * torch.nan, "not finite"),
        ("by_token", lambda x: x[:, :2].clone(), "another number of words"),
        ("std", None, "instead of"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(tmp_path, name, change, match):
    folder = make_run(tmp_path / "run", doubtful=make_doubtful(WORDS))
    path = folder / "predictions.safetensors"
    tensors, header = read_tensors(path)
    (key,) = [key for key in tensors if key.endswith(f"doubtful/{name}")]
    value = tensors.pop(key)
    write_tensors(path, tensors if change is None else {**tensors, key: change(value)}, header)
    with pytest.raises(RunError, match=f"doubtful examples of split 'test'.*{match}"):
        read_predictions(folder)


def test_words_that_are_no_words_are_refused(tmp_path):
    folder = make_run(tmp_path / "run", doubtful=make_doubtful(WORDS))
    path = folder / "predictions.safetensors"
    tensors, header = read_tensors(path)
    header = {"bayesattn": header["bayesattn"].replace('"words": {"test": [[', '"words": {"test": [[3, ')}
    write_tensors(path, tensors, header)
    with pytest.raises(RunError, match="words must be one list of words per split"):
        read_predictions(folder)


def test_most_doubtful_answers_of_a_model_are_drawn_once(tmp_path, monkeypatch):
    drawn = []

    def note(image, by_token, by_head, probabilities, **options):
        drawn.append(SimpleNamespace(image=image, by_token=by_token, probabilities=probabilities, **options))
        return Figure()

    monkeypatch.setattr(figures.plots, "plot_image_doubt", note)
    written = make_doubtful()
    folder = make_run(tmp_path / "run", doubtful=written)
    part = read_predictions(folder).splits["test"]
    found = drawn_from([folder])
    # drawn for light and for dark pages
    assert [figure.name for figure in found] == ["doubt-1-1", "doubt-1-2", "doubt-1-3"]
    assert len(drawn) == 6
    first = drawn[0]
    assert torch.equal(first.probabilities, part.samples["mean"][0, 7])
    assert torch.equal(first.by_token, written.by_token[0])
    assert first.image.shape == (4, 4, 3)
    assert float(first.image.min()) == 0.0
    assert int(first.image[..., 0].argmin()) == int(part.inputs[7].argmax())
    said, right = (first.class_names[int(k)] for k in (part.samples["mean"][0, 7].argmax(), part.labels[7]))
    assert first.title == f"Example 7: said {said}, is {right}"
    assert f"margin 0.10 with standard deviation {float(written.std[0]):.2f}" in found[0].caption
    assert {figure.section for figure in found} == {"BAM-WC, most doubtful answers"}


def test_words_stand_where_the_keys_are(tmp_path, monkeypatch):
    drawn = []
    plot = figures.plots.plot_doubt
    monkeypatch.setattr(figures.plots, "plot_doubt", lambda *args, **options: drawn.append(args) or plot(*args, **options))
    written = make_doubtful(WORDS)
    folder = make_run(tmp_path / "run", class_names=("ant", HOSTILE, "cat", "dog"), doubtful=written)
    assert len(drawn_from([folder])) == 3
    assert [words for words, *_ in drawn[::2]] == WORDS[:3]
    assert torch.equal(drawn[0][1], written.by_token[0, :3])


def test_page_shows_the_model_that_has_doubt_and_escapes_its_words(page_path):
    page = page_path.read_text()
    assert page.count('alt="soft, doubt in closed form: example ') == 3
    assert page.count("<h3>soft, most doubtful answers</h3>") == 1
    assert "BAM-WC, most doubtful answers" not in page
    assert "<script>alert" not in page
    assert {path.stem for path in (page_path.parent / "figures").glob("doubt-*")} == {f"doubt-2-{n}" for n in (1, 2, 3)}
