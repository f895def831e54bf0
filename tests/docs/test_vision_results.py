"""What configs and docs/results/vqa.md say of captioning and visual questions is what the CSV files give."""

import csv
from pathlib import Path

import pytest

from bayesattn_recipes.captioning import reproduce as captioning
from bayesattn_recipes.captioning import train as captioning_train
from bayesattn_recipes.vqa import train as vqa_train

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "results"


def rows(name: str, folder: Path = FOLDER) -> list[dict[str, str]]:
    with (folder / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_page_has_what_the_linear_model_said_to_test_questions():
    (row,) = [row for row in rows("vqa-daquar-linear.csv") if row["questions"] == "test"]
    page = (FOLDER / "vqa.md").read_text(encoding="utf-8").replace("\n", " ")
    assert f"is right on {float(row['accuracy']):.1f} % of DAQUAR's test questions" in page


def timed(mode: str) -> dict[str, dict[str, dict[str, str]]]:
    """Return the rows of a mode by case and provider."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows("vision.csv", ROOT / "benchmarks" / "results" / "h200"):
        if row["mode"] == mode:
            found.setdefault(row["case"], {})[row["provider"]] = row
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_steps_as_they_train_meet_the_aim(precision):
    found = timed(f"as it trains, {precision}")
    assert "Att2in coco b50 t16 r36" in found
    assert all(float(by_provider["BAM-WC"]["ratio"]) <= 1.10 for by_provider in found.values())


CONFIGS = {"captioning": captioning_train.CONFIGS, "vqa": vqa_train.CONFIGS}
# of the test images and questions, the latter with clean features
SHOWN = {"captioning": ("BLEU-4", "CIDEr"), "vqa": ("clean accuracy", "clean pavpu_05")}


def measured_lines(recipe: str) -> dict[str, str]:
    """Return the line that the header of a config has for its row of the table, by the name of the config."""
    found: dict[str, dict[str, list[float]]] = {}
    if recipe == "captioning":
        names = {shown: variant for variant, shown in captioning.VARIANTS.items()}
        for row in rows("captioning.csv"):
            if "beams" in row["search"]:
                values = found.setdefault(f"{row['dataset']}-{names[row['variant']]}", {})
                for name in SHOWN[recipe]:
                    values.setdefault(name, []).append(float(row[name]))
        texts = {"BLEU-4": "BLEU-4 {:.1f}", "CIDEr": "CIDEr {:.1f} with beams"}
    else:
        for row in rows("vqa.csv"):
            if row["measure"] in SHOWN[recipe]:
                values = found.setdefault(f"{row['dataset']}-{row['variant']}", {})
                values.setdefault(row["measure"], []).append(100.0 * float(row["value"]))
        texts = {"clean accuracy": "accuracy {:.1f}", "clean pavpu_05": "PAvPU {:.1f} on clean features"}

    def line(values: dict[str, list[float]]) -> str:
        means = ", ".join(text.format(sum(values[name]) / len(values[name])) for name, text in texts.items())
        return f"# Measured: {means}; mean of seeds 0 to {len(values[SHOWN[recipe][0]]) - 1} (docs/results/{recipe}.md)."

    return {name: line(values) for name, values in found.items()}


@pytest.mark.parametrize("recipe", CONFIGS)
def test_configs_say_what_was_measured_and_nothing_else(recipe):
    expected = measured_lines(recipe)
    for path in sorted(CONFIGS[recipe].glob("*.yaml")):
        said = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# Measured: ")]
        assert said == ([expected[path.stem]] if path.stem in expected else []), path.name
