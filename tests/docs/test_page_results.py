"""Every page of results is short, opens with its picture, and says no more than its CSV files give."""

import importlib
import re
import shutil
from pathlib import Path

import pytest
from scipy import stats

pytest.importorskip("torch_geometric")

from bayesattn_recipes import overview
from bayesattn_recipes.common import page as pages

FOLDER = Path(__file__).parents[2] / "docs" / "results"
# recipe: the differences that its page may call clear, as (data set, kind, is better)
CLEAR = {
    "graph": {
        ("Cora, splits, 100 NLL, scaled", "ensemble of 3", True),
        ("Cora, splits, 100 NLL, scaled", "BAM-LF", True),
    },
    "language": set(),
    "translation": {("Multi30k, mean of 4 tests", "exact marginal", True)},
    "captioning": set(),
    "vqa": set(),
    "digits": {
        ("digits, accuracy", "ensemble of 3", True),
        ("digits, accuracy", "uniform", False),
        ("digits, accuracy under noise", "ensemble of 3", True),
        ("digits, accuracy under noise", "uniform", False),
        ("digits, 100 NLL, scaled", "ensemble of 3", True),
        ("digits, 100 NLL, scaled", "BAM-WC", True),
        ("digits, 100 NLL, scaled", "uniform", False),
        ("shapes, accuracy", "MC dropout", True),
        ("shapes, accuracy", "uniform", False),
        ("shapes, accuracy under noise", "uniform", False),
        ("shapes, 100 NLL, scaled", "uniform", False),
    },
}


def read(recipe: str) -> pages.Page:
    return importlib.import_module(f"bayesattn_recipes.{recipe}.page").read(FOLDER)


@pytest.mark.parametrize("recipe", CLEAR)
def test_table_is_what_the_csv_files_give(recipe):
    text = (FOLDER / f"{recipe}.md").read_text(encoding="utf-8")
    module = importlib.import_module(f"bayesattn_recipes.{recipe}.page")
    assert pages.with_table(text, getattr(module, "table", pages.effect_table)(read(recipe))) == text


@pytest.mark.parametrize("recipe", CLEAR)
def test_verdict_rests_on_what_is_clear_after_holm(recipe):
    found = {(effect.group, effect.kind, effect.value > 0.0) for effect in read(recipe).effects if effect.is_clear}
    assert found == CLEAR[recipe]
    verdict = (FOLDER / f"{recipe}.md").read_text(encoding="utf-8").split("\n\n")[1]
    assert verdict.startswith("**Verdict: ")
    assert "no difference" in verdict.lower()


@pytest.mark.parametrize("page", sorted(path.stem for path in FOLDER.glob("*.md")))
def test_page_is_short(page):
    assert len((FOLDER / f"{page}.md").read_text(encoding="utf-8").split()) <= 1200


@pytest.mark.parametrize("page", [*CLEAR, "doubt"])
def test_page_opens_with_its_figure(page):
    first = "\n".join((FOLDER / f"{page}.md").read_text(encoding="utf-8").splitlines()[:30])
    assert re.search(rf"!\[[^\]]{{40,}}\]\({page}\.png\)", first)
    assert (FOLDER / f"{page}.png").stat().st_size > 10_000
    if page in CLEAR:
        for question in ("**Same data?**", "**Same model?**", "**Paper's settings?**"):
            assert question in first


def test_digits_page_names_the_settings_that_were_chosen():
    text = (FOLDER / "digits.md").read_text(encoding="utf-8")
    for dataset in ("digits", "shapes"):
        chosen = {row["kind"]: row["setting"] for row in pages.read_rows(FOLDER / f"{dataset}.csv")}
        for kind, setting in chosen.items():
            (line,) = re.findall(
                rf"^\| .*{kind.removesuffix(' of 3')}.*\|.*\|.*\|.*\|$", text.split("## How")[1], re.MULTILINE
            )
            cell = line.split("|")[3 if dataset == "digits" else 4]
            assert re.findall(r"[\d.]+", cell) == re.findall(r"(?<==)[\d.]+", setting)


def test_digits_page_gives_the_means_of_changed_priors():
    text = (FOLDER / "digits.md").read_text(encoding="utf-8")
    rows = pages.read_rows(FOLDER / "digits-sensitivity.csv")
    line = r"^\| (?:k =|β =|prior network of width|width) ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$"
    shown = re.findall(line, text, re.MULTILINE)
    changes = list(dict.fromkeys(row["changed"] for row in rows))
    assert [value for value, *_ in shown] == [change.partition("=")[2] for change in changes]
    for change, (_, accuracy, nll) in zip(changes, shown, strict=True):
        found = [row for row in rows if row["changed"] == change]
        assert len(found) == 5
        assert float(accuracy) == pytest.approx(sum(100 * float(row["accuracy"]) for row in found) / 5, abs=0.05)
        assert float(nll) == pytest.approx(sum(float(row["scaled_nll"]) for row in found) / 5, abs=5e-4)
    tests = [row for row in pages.read_rows(FOLDER / "digits.csv") if (row["kind"], row["condition"]) == ("soft", "test")]
    soft = [row for row in tests if int(row["seed"]) < 5]
    accuracy, nll = (sum(float(row[name]) for row in soft) / 5 for name in ("accuracy", "scaled_nll"))
    assert f"({100 * accuracy:.1f} and {nll:.3f} with these five" in text


def test_digits_page_compares_two_weights_of_the_prior():
    text = (FOLDER / "digits.md").read_text(encoding="utf-8")
    rows = pages.read_rows(FOLDER / "digits-sensitivity.csv")
    weak, chosen = (
        {row["seed"]: float(row["scaled_nll"]) for row in rows if row["changed"] == f"attention.gamma_beta={beta}"}
        for beta in ("0.1", "1")
    )
    p_value = stats.ttest_rel([weak[seed] for seed in chosen], list(chosen.values()))[1]
    assert f"(NLL of β = 0.1 against 1: p = {p_value:.2f}, uncorrected)" in text


def test_language_search_was_as_unequal_as_the_page_says():
    text = (FOLDER / "language.md").read_text(encoding="utf-8")
    searched = [row for row in pages.read_rows(FOLDER / "language-search.csv") if row["variant"] == "BAM-WC"]
    for task in ("mrpc", "cola"):
        rows = [row for row in searched if row["task"] == task]
        assert len({(row["learning_rate"], row["epochs"], row["weibull_k"], row["kl_weight"]) for row in rows}) == 5
        assert min(float(row["kl_weight"]) for row in rows) == 1e-3
    assert "1e-05" in {row["kl_weight"] for row in searched if row["task"] == "rte"}
    assert {row["weibull_k"] for row in searched} == {"1.0"}
    assert text.count("| BAM-WC | 5 | 6 / 0 |") == text.count("| BAM-WC | 5 | 5 / 0 |") == 2
    gains = []
    for task in ("mrpc", "cola", "rte"):
        found = [float(row["accuracy"]) for row in searched if row["task"] == task and float(row["kl_weight"]) >= 1e-3]
        gains.append(100 * (max(found) - min(found)))
    assert f"it hardly learns (at most {max(gains):.1f} points above the majority class)" in text


def test_language_page_counts_its_shifted_sets():
    language = importlib.import_module("bayesattn_recipes.language.page")
    values = language.read_values(FOLDER)
    raw, scaled = (language.shifted(values, metric) for metric in ("nll", "scaled_nll"))
    assert len(raw) == len(scaled) == 14
    assert all(effect.value > 0.0 for effect in raw)
    assert sum(effect.is_clear for effect in raw) == 3
    assert not any(effect.is_clear for effect in scaled)


def test_graph_page_takes_random_splits_where_they_have_been_run(tmp_path):
    shutil.copy(FOLDER / "graph-seeds.csv", tmp_path)
    lines = ["dataset,kind,seed,setting,settings_tried,accuracy,scaled_nll"]
    for kind, gain in (("soft", 0.0), ("uniform", -0.05)):
        for seed in range(1, 6):
            accuracy = 0.7 + gain + 0.01 * (seed + gain * seed * seed)
            nll = 0.5 - gain + 0.01 * seed * seed * (1.0 + gain)
            lines.append(f"pubmed,{kind},{seed},dropout=0.4,8,{accuracy},{nll}")
    (tmp_path / "graph-splits.csv").write_text("\n".join(lines) + "\n")
    module = importlib.import_module("bayesattn_recipes.graph.page")
    *public, accuracy, nll = module.read(tmp_path).effects
    assert len(public) == 15
    assert accuracy.group == "PubMed, splits, accuracy"
    assert (accuracy.kind, accuracy.runs, accuracy.search) == ("uniform", 5, "8 / 8")
    # −5 points, and on average −0.05 × 11 more; the NLL is 5 hundredths higher, less 0.05 × 11 of them
    assert accuracy.value == pytest.approx(-5.55)
    assert (nll.group, nll.value) == ("PubMed, splits, 100 NLL, scaled", pytest.approx(-4.45))
    assert "| PubMed, splits | uniform | 5 | 8 / 8 | -5.55" in module.table(module.read(tmp_path))


def test_exact_marginal_is_above_soft_with_each_seed():
    module = importlib.import_module("bayesattn_recipes.translation.page")
    rows = [row for row in pages.read_rows(FOLDER / "translation" / "multi30k.csv") if row["bleu"]]
    exact, soft = (module._means([r for r in rows if r["test"] in module.TESTS], name, 4) for name in ("exact", "soft"))
    gains = [round(exact[seed] - soft[seed], 1) for seed in range(7)]
    first, later = gains[:3], gains[3:]
    shown = f"The first three gain {min(first)} to {max(first)} points, the four added later {min(later)} to {max(later)}"
    exactly = [exact[seed] - soft[seed] for seed in range(3, 7)]
    alone = f"(on average {sum(exactly) / 4:.2f}, p = {stats.ttest_1samp(exactly, 0.0)[1]:.3f} before Holm)"
    assert f"{shown} {alone}." in (FOLDER / "translation.md").read_text(encoding="utf-8")
    assert min(gains) > 0.0


def test_bam_wc_is_compared_where_it_shares_soft_attentions_initial_values():
    (found,) = (e for e in read("translation").effects if e.kind == "BAM-WC" and e.group.startswith("Multi30k"))
    assert found.runs == 4


def test_overview_shows_every_application():
    drawn = overview.read(FOLDER).effects
    assert {effect.group.split(":")[0] for effect in drawn} >= {
        "graphs",
        "language",
        "translation",
        "captions",
        "visual questions",
    }
    assert (FOLDER / "overview.png").exists()


def test_no_result_lies_around_that_no_page_names():
    named = "".join(path.read_text(encoding="utf-8") for path in (FOLDER.parent).rglob("*.md"))
    # the study of doubt has a test of its own
    files = [p for p in FOLDER.rglob("*") if p.suffix in (".csv", ".png", ".json") and not p.name.startswith("doubt")]
    assert not [path.name for path in files if path.name not in named]


def test_holm_is_that_of_the_definition():
    effects = [pages.Effect("g", "k", 5, 0.0, 0.0, -1.0, 1.0, p, "–") for p in (0.04, 0.01, 0.03)]
    assert [effect.holm for effect in pages.corrected(effects)] == pytest.approx([0.06, 0.03, 0.06])


def test_effects_need_two_pairs_and_a_page_one_table():
    with pytest.raises(ValueError, match="must share at least 2 seeds with soft attention, got 1"):
        pages.compare("g", "k", {0: 1.0, 1: 2.0}, {1: 1.0}, search="–")
    with pytest.raises(ValueError, match="must have exactly one block"):
        pages.with_table("no marks", "table")


def test_a_negative_scale_turns_what_is_better_when_smaller():
    found = pages.compare("g", "k", {0: 1.0, 1: 2.1, 2: 3.0}, {0: 2.0, 1: 3.0, 2: 4.0}, search="–", scale=-10.0)
    assert found.value == pytest.approx(29 / 3)
    assert found.baseline == pytest.approx(30.0)


def test_uniform_attention_is_level_with_soft_on_every_graph():
    found = [effect for effect in read("graph").effects if effect.kind == "uniform"]
    assert len(found) == 6
    assert all(effect.runs == 20 and effect.low < 0.0 < effect.high for effect in found)
