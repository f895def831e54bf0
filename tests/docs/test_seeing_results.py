"""The tables of docs/results/captioning.md, vqa.md and benchmarks/README.md are what the committed CSV files give."""

import csv
import re
from pathlib import Path

import pytest

from bayesattn.evaluation.aggregate import over_runs
from bayesattn_recipes.captioning import reproduce as captioning
from bayesattn_recipes.captioning import train as captioning_train
from bayesattn_recipes.common.tables import paired, show
from bayesattn_recipes.vqa import reproduce as vqa
from bayesattn_recipes.vqa import train as vqa_train
from bayesattn_recipes.vqa.tables import render

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "results"


def rows(name: str, folder: Path = FOLDER) -> list[dict[str, str]]:
    with (folder / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def tables(page: str) -> dict[str, list[str]]:
    """Return the lines between the marks `<!-- name -->` and `<!-- end -->`, by name."""
    text = (FOLDER / page).read_text(encoding="utf-8")
    return {
        name: lines(found) for name, found in re.findall(r"<!-- (?:captioning|vqa) (.*?) -->\n(.*?)<!-- end -->", text, re.S)
    }


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("## ")]


@pytest.mark.parametrize("dataset", ["flickr8k", "shapes"])
def test_tables_of_captions_are_those_of_the_runs(dataset):
    names = {shown: variant for variant, shown in captioning.VARIANTS.items()}
    found: dict[str, dict] = {}
    for row in rows("captioning.csv"):
        if row["dataset"] == dataset:
            cell = {name: value if name == "tokenizer" else float(value) for name, value in list(row.items())[4:]}
            cell |= {"num_parameters": int(row["num_parameters"]), "skipped": {}}
            found.setdefault(row["search"], {}).setdefault(names[row["variant"]], {})[int(row["seed"])] = cell
    written = tables("captioning.md")
    assert len(found) == 2
    for search, cells in found.items():
        assert written[f"{dataset}, {search}, ours"] == lines(captioning._page("", cells))


@pytest.mark.parametrize("dataset", ["daquar", "shapes"])
def test_tables_of_answers_are_those_of_the_runs(dataset):
    cells: dict[str, dict] = {}
    for row in rows("vqa.csv"):
        if row["dataset"] == dataset:
            value = float(row["value"])
            measures = cells.setdefault(row["variant"], {}).setdefault(int(row["seed"]), {})
            measures[row["measure"]] = int(value) if row["measure"] == "num_parameters" else value
    assert tables("vqa.md")[dataset] == lines(render(dataset, cells, vqa.NUM_SAMPLES))


@pytest.mark.parametrize("variant", ["soft", "BAM-WC", "hard (REINFORCE)"])
def test_first_table_of_captions_is_of_the_five_beams(variant):
    found = [row for row in rows("captioning.csv") if (row["search"], row["variant"]) == ("5 beams", variant)]
    cells = [show(over_runs([float(row[name]) for row in found]), 1.0, 1) for name in ("BLEU-4", "CIDEr")]
    assert f"| {variant} | {' | '.join(cells)} |" in (FOLDER / "captioning.md").read_text(encoding="utf-8")


def test_what_the_page_of_answers_says_first_is_in_the_csv():
    values: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in rows("vqa.csv"):
        values.setdefault((row["dataset"], row["variant"], row["measure"]), {})[int(row["seed"])] = float(row["value"])
    conditions = {name.removesuffix(" pavpu_05") for _, _, name in values if name.endswith(" pavpu_05")}

    def compared(dataset: str, variants: list[str], measure: str):
        keys = [(variant, f"{condition} {measure}") for variant in variants for condition in conditions]
        return [
            paired(values[dataset, variant, name], values[dataset, "soft", name])
            for variant, name in keys
            if (dataset, variant, name) in values
        ]

    def ends(found, digits: int) -> tuple[float, float]:
        differences = [x.difference.value for x in found]
        return round(min(differences), digits), round(max(differences), digits)

    accuracy, certain = compared("daquar", ["wc"], "accuracy"), compared("daquar", ["wc"], "pavpu_05")
    assert ends(accuracy, 3) == (-0.003, -0.001)
    assert sum(x.p_value < 0.05 for x in accuracy) == 2
    assert min(x.p_value for x in accuracy) * len(accuracy) > 0.05  # Bonferroni's correction
    assert ends(certain, 3) == (-0.029, -0.021)
    assert max(x.p_value for x in certain) < 1e-4
    assert ends(compared("daquar", ["wc"], "nll"), 2) == (0.07, 0.12)
    others = ["nokl", "lf", "lc", "wf"]
    accuracy = compared("daquar", others, "accuracy")
    assert (len(accuracy), ends(accuracy, 3)) == (28, (-0.006, 0.005))
    assert sum(x.p_value <= 0.09 for x in accuracy) == 1
    assert ends(compared("daquar", others, "pavpu_05"), 3) == (-0.05, -0.019)
    accuracy = compared("shapes", [*others, "wc"], "accuracy")
    assert ends(accuracy, 3) == (-0.035, 0.032)
    assert min(x.p_value for x in accuracy) >= 0.1


@pytest.mark.parametrize("name", ["vqa-noisy-validation.csv", "vqa-sizes-validation.csv"])
def test_the_page_has_the_means_of_the_noisy_validation_questions(name):
    settings: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows(name):
        settings.setdefault((row["config"], row["settings"]), []).append(row)
    page = (FOLDER / "vqa.md").read_text(encoding="utf-8")
    assert len(settings) == 8

    def mean(found: list[dict[str, str]], conditions: list[str], name: str) -> float:
        chosen = [float(row[name]) for row in found if row["condition"] in conditions]
        return sum(chosen) / len(chosen)

    noisy = [f"noise {level}x" for level in ("0.5", "1", "2", "4", "8")]
    for found in settings.values():
        accuracy = [100 * mean(found, [c], "accuracy") for c in ("clean", "noise 1x", "noise 4x", "noise 8x")]
        accuracy.append(100 * mean(found, noisy, "accuracy"))
        certain = [100 * mean(found, conditions, "pavpu_05") for conditions in (["clean"], noisy)]
        nll = [mean(found, [c], "nll") for c in ("clean", "noise 8x")]
        shown = [*(f"{value:.1f}" for value in (*accuracy, *certain)), *(f"{value:.2f}" for value in nll)]
        assert " | ".join(shown) in page


def by_fold(row: dict[str, str], measure: str = "accuracy") -> dict[int, float]:
    """Return a measure of a setting of the search, in per cent by fold of training images or, on test questions, by seed."""
    return dict(zip(map(int, row["folds_or_seeds"].split()), map(float, row[measure].split()), strict=True))


@pytest.fixture(scope="module")
def searched():
    """Settings of DAQUAR's search on held-out images by round, each round's with the most folds first."""
    found: dict[str, list[dict[str, str]]] = {}
    for row in rows("vqa-daquar-search.csv"):
        if row["questions"] == "held out":
            found.setdefault(row["round"], []).append(row)
    return found


# settings that only the table's have among all that were searched
OF_THE_TABLE = {"attention": "soft", "output": "sigmoid", "learning_rate": "0.0003"}


def test_search_has_the_settings_of_the_table_on_all_folds(searched):
    config = vqa_train.load_config("daquar-soft")
    for number, folds in (("1", 3), ("2", 7)):
        (row,) = [row for row in searched[number] if OF_THE_TABLE.items() <= row.items()]
        sizes = [int(row[name]) for name in ("num_layers", "width", "epochs", "batch_size", "answer_min_count")]
        size, data = config.model, config.data
        given = [size.num_layers, size.width, config.training.epochs, config.training.batch_size, data.answer_min_count]
        assert sizes == given
        assert (float(row["dropout"]), float(row["attention_dropout"])) == (size.dropout, size.attention_dropout)
        assert len(by_fold(row)) == folds


def test_page_has_the_counts_of_the_search(searched):
    page = (FOLDER / "vqa.md").read_text(encoding="utf-8")
    for number in "123":
        runs = sum(len(by_fold(row)) for row in searched[number])
        assert f"**Round {number}**, {runs} runs of {len(searched[number])} settings" in page
    bayesian = [row for row in searched["2"] if row["attention"] == "BAM-WC"]
    assert f"{sum(len(by_fold(row)) for row in bayesian)} of the runs with BAM-WC" in page
    measured = {"round", "folds_or_seeds", "accuracy", "accuracy_single", "accuracy_averaged_weights", "accuracy_noise_8x"}
    settings = {
        tuple(value for name, value in row.items() if name not in measured) for number in "123" for row in searched[number]
    }
    assert f"of {len(settings)} settings did not find one" in page


def test_page_compares_searched_settings_with_the_tables_on_the_same_folds(searched):
    table: dict[int, float] = {}
    for number in "12":
        table |= by_fold(next(row for row in searched[number] if OF_THE_TABLE.items() <= row.items()))
    chosen = [row for row in searched["1"] if {0, 1, 2} <= by_fold(row).keys()]
    best = max(chosen, key=lambda row: sum(by_fold(row)[fold] for fold in range(3)))
    names = list(best)[2 : list(best).index("folds_or_seeds")]
    without = {name: best[name] for name in names} | {"weight_decay": "0.0"}
    again = next(row for row in searched["2"] if without.items() <= row.items())
    linear = dict(enumerate(float(row["accuracy"]) for row in rows("vqa-daquar-linear.csv") if row["questions"] != "test"))
    page = (FOLDER / "vqa.md").read_text(encoding="utf-8")
    for setting, found, folds in (
        ("best of round 1 on the folds that chose it", by_fold(best), range(3)),
        ("the same without weight decay, on the others", by_fold(again), range(3, 10)),
        ("round 3, dropout 0.1", by_fold(next(row for row in searched["3"] if row["dropout"] == "0.1")), range(9)),
        ("round 3, dropout 0.3", by_fold(next(row for row in searched["3"] if row["dropout"] == "0.3")), range(9)),
        ("a linear model without attention", linear, range(10)),
    ):
        ours, theirs = ({fold: values[fold] for fold in folds} for values in (found, table))
        means = [f"{sum(values.values()) / len(values):.1f}" for values in (ours, theirs)]
        cells = [setting, f"{folds[0]} to {folds[-1]}", *means, show(paired(ours, theirs).difference, 1.0, 1)]
        assert f"| {' | '.join(cells)} |" in page


def test_page_has_what_the_searched_setting_said_to_test_questions():
    found = {row["attention"]: row for row in rows("vqa-daquar-search.csv") if row["questions"] == "test"}
    soft, wc = by_fold(found["soft"]), by_fold(found["BAM-WC"])
    single = by_fold(found["soft"], "accuracy_single")
    page = (FOLDER / "vqa.md").read_text(encoding="utf-8").replace("\n", " ")
    means = [f"{sum(values.values()) / 3:.1f}" for values in (soft, single, wc)]
    seeds = ", ".join(f"{value:.1f}" for value in soft.values())
    assert f"{means[0]} % over three seeds ({seeds}), {means[1]} % on those with single answers" in page
    assert f"BAM-WC {means[2]} (three seeds)" in page


def test_page_has_what_the_linear_model_said_to_test_questions():
    (row,) = [row for row in rows("vqa-daquar-linear.csv") if row["questions"] == "test"]
    page = (FOLDER / "vqa.md").read_text(encoding="utf-8").replace("\n", " ")
    assert (
        f"{float(row['accuracy']):.1f} % of the test questions, {float(row['accuracy_single']):.1f} % of those with single"
        in page
    )


def timed(mode: str) -> dict[str, dict[str, dict[str, str]]]:
    """Return the rows of a mode by case and provider."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows("seeing.csv", ROOT / "benchmarks" / "results" / "h200"):
        if row["mode"] == mode:
            found.setdefault(row["case"], {})[row["provider"]] = row
    return found


def timed_line(by_provider: dict[str, dict[str, str]]) -> str:
    ratios = (f"× {float(by_provider[name]['ratio']):.2f}" for name in ("BAM-NOKL", "BAM-WC", "soft, again"))
    return f"| {float(by_provider['soft']['median_ms']):.2f} ms | {' | '.join(ratios)} |"


def test_pages_have_the_timed_steps():
    """Ratios to soft attention of steps as CUDA graphs: a row a model on its page, and in the README of the benchmarks."""
    found = timed("train step, CUDA graph")
    assert len(found) == 4
    benchmarks = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for case, by_provider in found.items():
        page = (FOLDER / ("vqa.md" if case.startswith("MCAN") else "captioning.md")).read_text(encoding="utf-8")
        nokl, wc, again = (f"{float(by_provider[name]['ratio']):.2f}" for name in ("BAM-NOKL", "BAM-WC", "soft, again"))
        assert timed_line(by_provider) in page
        assert f"| {nokl} | **{wc}** | {again} |" in benchmarks


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_pages_have_the_steps_as_they_train_and_these_meet_the_aim(precision):
    captioning_page, answers = ((FOLDER / name).read_text(encoding="utf-8") for name in ("captioning.md", "vqa.md"))
    found = timed(f"as it trains, {precision}")
    assert "Att2in coco b50 t16 r36" in found
    for case, by_provider in found.items():
        ratio = float(by_provider["BAM-WC"]["ratio"])
        assert ratio <= 1.10
        if case.startswith("Att2in"):
            assert timed_line(by_provider) in captioning_page
        else:
            assert f"{ratio:.2f} times" in answers


def test_recorded_steps_train_as_the_runs_of_the_table_did():
    differences = [
        abs(float(row[f"{name}, before"]) - float(row[f"{name}, recorded steps"]))
        for row in rows("captioning-recorded.csv")
        for name in ("train_nll", "validation_nll")
    ]
    assert len(differences) == 2 * 6 * 2
    assert max(differences) <= 0.002


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
