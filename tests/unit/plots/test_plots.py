"""Figures: the numbers in them are the metrics', they survive any names, and they leave no trace in pyplot."""

import io
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from bayesattn import metrics, plots
from bayesattn.plots import style
from helpers import no_type_checks

B, S, C = 97, 7, 5


def _table():
    samples = torch.softmax(torch.randn(S, B, C) + 2 * torch.randn(B, C), -1)
    labels = torch.where(torch.rand(B) < 0.6, samples.mean(0).argmax(-1), torch.randint(C, (B,)))
    return samples, metrics.tabulate_predictions(samples, labels)


def _weights(*shape: int) -> torch.Tensor:
    return torch.softmax(torch.randn(*shape), -1)


def _graph():
    edges = torch.tensor([[3, 1, 2, 0, 4], [0, 0, 0, 0, 1]])
    return edges, torch.rand(S, 5)


def _all() -> dict[str, Figure]:
    samples, table = _table()
    curve = {"soft": metrics.pavpu_by_threshold(samples, table.accuracy, num_resamples=10)}
    return {
        "reliability": plots.plot_reliability(table.confidence, table.accuracy),
        "risk": plots.plot_risk_coverage(
            {"soft": (table.confidence, table.accuracy), "BAM-WC": (-table.entropy, table.accuracy)}
        ),
        "pavpu": plots.plot_pavpu(curve),
        "p_values": plots.plot_p_values(table.p_value, table.accuracy),
        "entropy": plots.plot_entropy(table.entropy, table.entropy + 0.5),
        "attention": plots.plot_attention(_weights(S, 3, 4), prior_weights=_weights(4)),
        "heads": plots.plot_attention_heads(_weights(S, 5, 3, 4)),
        "graph": plots.plot_edge_uncertainty(*_graph(), 0),
    }


@pytest.mark.parametrize("name", list(_all()))
def test_every_figure_is_drawn_with_something_on_it(name):
    figure = _all()[name]
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=50)
    image.seek(0)
    pixels = matplotlib.image.imread(image)[..., :3]
    assert (pixels.min(axis=-1) < 0.9).mean() > 0.01


@pytest.mark.parametrize("name", list(_all()))
def test_every_figure_saves_as_svg(name):
    text = io.StringIO()
    _all()[name].savefig(text, format="svg")
    assert "<svg" in text.getvalue()


def test_figures_leave_no_global_state():
    code = (
        "import sys, torch\nfrom bayesattn import plots\n"
        "plots.plot_entropy(torch.rand(9), torch.rand(5)).savefig(sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, "/dev/null" if sys.platform == "win32" else "/dev/stdout"],
        check=True,
        capture_output=True,
    )


def test_reliability_points_are_the_bins():
    _, table = _table()
    ax = plots.plot_reliability(table.confidence, table.accuracy, num_bins=10).axes[0]
    bins = metrics.reliability_bins(table.confidence, table.accuracy, num_bins=10)
    x, y = ax.lines[1].get_data()
    np.testing.assert_allclose(x, bins.confidence)
    np.testing.assert_allclose(y, bins.accuracy)
    ece = float(metrics.expected_calibration_error(table.confidence, table.accuracy, num_bins=10))
    assert f"{ece:.3f}" in ax.get_title()


def test_risk_curve_ends_at_the_error_rate_and_names_its_area():
    _, table = _table()
    figure = plots.plot_risk_coverage({"cost $5 $x^2$": (table.confidence, table.accuracy)})
    assert figure.axes[0].lines[0].get_ydata()[-1] == pytest.approx(1 - float(table.accuracy.mean()))
    area = float(metrics.aurc(table.confidence, table.accuracy))
    assert f"AURC {area:.3f}" in figure.legends[0].get_texts()[0].get_text()


def test_risk_curve_of_several_runs_is_their_mean():
    tables = [_table()[1] for _ in range(3)]
    figure = plots.plot_risk_coverage({"a": [(table.confidence, table.accuracy) for table in tables]})
    curves = [metrics.risk_coverage(table.confidence, table.accuracy) for table in tables]
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), np.mean([curve.risk for curve in curves], axis=0))
    area = np.mean([float(metrics.aurc(table.confidence, table.accuracy)) for table in tables])
    assert figure.legends[0].get_texts()[0].get_text() == f"a (AURC {area:.3f})"


@pytest.mark.parametrize("count", [1, 9])
def test_legend_of_many_long_names_hides_no_line(count):
    samples, table = _table()
    called = [f"digits BAM-WC dataset={'generated ' * 20}learning_rate=0.0{index}, MC dropout" for index in range(count)]
    points = metrics.pavpu_by_threshold(samples, table.accuracy, num_resamples=2)
    columns = (table.confidence, table.accuracy)
    for figure in (
        plots.plot_risk_coverage(dict.fromkeys(called, columns), title="long " * 40),
        plots.plot_pavpu(dict.fromkeys(called, points)),
        plots.plot_reliability(*columns, title="x" * 150),
        plots.plot_attention_heads(_weights(S, 5, 3, 4), title="long " * 40),
    ):
        # a layout that fails is a warning, and so an error here
        figure.draw_without_rendering()
        assert min(ax.get_window_extent().height for ax in figure.axes if ax.get_visible()) > 30
        page = figure.bbox
        for text in (part for ax in figure.axes for part in (ax.title, ax.xaxis.label)):
            assert text.get_window_extent().x1 <= page.x1 + 1
        for legend in figure.legends:
            box = legend.get_window_extent()
            assert box.x0 >= -1
            assert box.x1 <= page.x1 + 1
            assert all(not box.overlaps(ax.get_window_extent()) for ax in figure.axes)


@pytest.mark.parametrize(("over", "expected"), [("threshold", "M = 7"), ("num_samples", "threshold 0.05")])
def test_pavpu_figure_says_what_is_behind_it(over, expected):
    samples, table = _table()
    if over == "threshold":
        points = metrics.pavpu_by_threshold(samples, table.accuracy, num_resamples=10, test="welch")
    else:
        points = metrics.pavpu_by_num_samples(samples, table.accuracy, [2, 7], num_resamples=10, test="welch")
    ax = plots.plot_pavpu({"a": points}, over=over).axes[0]
    assert expected in ax.get_title()
    assert "welch" in ax.get_title()
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [point.value for point in points])


def test_p_value_histogram_shares_sum_to_one_in_each_group():
    _, table = _table()
    ax = plots.plot_p_values(table.p_value, table.accuracy).axes[0]
    assert [stairs.get_data().values.sum() for stairs in ax.patches] == pytest.approx([1.0, 1.0])


def test_attention_panels_are_prior_mean_deviation_and_samples():
    weights, prior = _weights(S, 3, 4), _weights(4)
    figure = plots.plot_attention(weights, prior_weights=prior, num_shown=1, queries=["a", "b", "c"])
    maps = [ax for ax in figure.axes if ax.images]
    assert [ax.get_title() for ax in maps] == ["prior Ψ", "mean of W", "standard deviation of W", "sample 1"]
    shown = [ax.images[0].get_array() for ax in maps]
    np.testing.assert_allclose(shown[0][0], prior, rtol=1e-6)
    np.testing.assert_allclose(shown[1], weights.mean(0), rtol=1e-5)
    np.testing.assert_allclose(shown[2], weights.std(0), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(shown[3], weights[0], rtol=1e-6)
    # the maps of weights share one scale, or they could not be compared
    assert len({ax.images[0].get_clim() for ax in (maps[0], maps[1], maps[3])}) == 1


def test_heads_and_steps_choose_the_right_rows():
    weights = _weights(S, 3, 5, 4)
    figure = plots.plot_attention_heads(weights, statistic="std", steps=[4, 1])
    maps = [ax.images[0].get_array() for ax in figure.axes if ax.images]
    assert len(maps) == 3
    for head, shown in enumerate(maps):
        np.testing.assert_allclose(shown, weights.std(0)[head, [4, 1]], rtol=1e-4, atol=1e-7)


def test_edges_are_ordered_by_their_mean_weight():
    edges, weights = _graph()
    figure = plots.plot_edge_uncertainty(edges, weights, 0, max_neighbors=3)
    bars = figure.axes[1].patches
    expected = weights[:, :4].mean(0).sort(descending=True)
    np.testing.assert_allclose([bar.get_width() for bar in bars], expected.values[:3], rtol=1e-5)
    names = [text.get_text() for text in figure.axes[1].get_yticklabels()]
    assert names == [str(int(edges[0, index])) for index in expected.indices[:3]]


def test_palette_is_distinct_in_grey_where_lines_share_a_style():
    def grey(color: str) -> float:
        red, green, blue = matplotlib.colors.to_rgb(color)
        return 0.299 * red + 0.587 * green + 0.114 * blue

    # good against bad carries meaning, and every neighbor in the order differs
    assert abs(grey(style.GOOD) - grey(style.BAD)) > 0.05
    assert all(abs(grey(a) - grey(b)) > 0.03 for a, b in zip(style.COLORS, style.COLORS[1:], strict=False))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.plot_risk_coverage({}), "curves must hold at least one model, got none"),
        (lambda: plots.plot_pavpu({"a": []}), "must hold at least one PAvPU, got none"),
        (lambda: plots.plot_pavpu({"a": []}, over="time"), "over must be one of 'threshold', 'num_samples', got 'time'"),
        (lambda: plots.plot_entropy(torch.zeros(0), torch.rand(3)), "at least one value each, got 0 and 3"),
        (lambda: plots.plot_attention(_weights(1, 3, 4)), "at least 2 draws"),
        (lambda: plots.plot_attention(_weights(3, 3, 4), keys=["a"]), "keys must have 4 entries, got 1"),
        (lambda: plots.plot_attention_heads(_weights(3, 2, 3, 4), steps=[3]), "from 0 to 2"),
        (
            lambda: plots.plot_attention_heads(_weights(3, 2, 3, 4), statistic="mode"),
            "statistic must be one of 'mean', 'std', got 'mode'",
        ),
        (lambda: plots.plot_edge_uncertainty(*_graph(), 3), "no incoming edge"),
        (
            lambda: plots.plot_edge_uncertainty(*_graph(), 0, labels=["a"]),
            "labels must have at least 5 entries, one per node, got 1",
        ),
    ],
)
def test_bad_input_is_refused(call, message, monkeypatch):
    no_type_checks(monkeypatch)
    with pytest.raises(ValueError, match=message):
        call()
