"""The calibration of several models on several data sets, in one figure."""

import numpy as np
import torch

from bayesattn import metrics
from bayesattn_recipes.language.calibration_figure import plot_calibration


def random_columns():
    generator = torch.Generator().manual_seed(0)
    confidence = 0.5 + 0.5 * torch.rand(60, generator=generator, dtype=torch.float64)
    return confidence, (torch.rand(60, generator=generator) < confidence).double()


def test_calibration_gives_a_model_one_look_in_all_panels():
    columns = random_columns()
    figure = plot_calibration({"a": {"soft": columns, "BAM-WC": columns}, "b": {"BAM-WC": columns}}, num_bins=3)
    first, second = figure.axes
    assert [ax.get_title() for ax in figure.axes] == ["a", "b"]
    assert first.lines[2].get_color() == second.lines[1].get_color() != first.lines[1].get_color()
    bins = metrics.reliability_bins(*columns, num_bins=3, scheme="equal_count")
    np.testing.assert_allclose(second.lines[1].get_data(), np.stack([bins.confidence, bins.accuracy]))


def test_legend_of_calibration_names_models_of_all_panels():
    columns = random_columns()
    figure = plot_calibration({"a": {"soft": columns}, "b": {"BAM-WC": columns, "soft": columns}}, num_bins=3)
    texts = figure.legends[0].get_texts()
    assert [text.get_text() for text in texts] == ["soft", "BAM-WC"]


def test_long_names_hide_no_line():
    columns, called = random_columns(), [f"{'name ' * 20}{index}" for index in range(9)]
    figure = plot_calibration({"a": dict.fromkeys(called, columns), "b": {called[0]: columns}}, title="long " * 40)
    # a layout that fails is a warning, and so an error here
    figure.draw_without_rendering()
    assert min(ax.get_window_extent().height for ax in figure.axes) > 30
