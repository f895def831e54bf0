"""Rewrite the numbers that README and guides quote, from the CSV files of docs/results and benchmarks/results.

    python docs/site/front.py

The tables of the README and of the page on performance are written whole. In prose, a template says which words stand
around a number; a page that has lost its words is an error, so no number stays behind unnoticed. A test fails while the
pages and the files differ.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from scipy import stats

from bayesattn.evaluation.aggregate import over_runs
from bayesattn_recipes.bench.harness import read_csv
from bayesattn_recipes.common.tables import markdown
from bayesattn_recipes.digits import page as digits
from bayesattn_recipes.doubt import table as doubt
from bayesattn_recipes.doubt.rankings import BASELINE, FLAGSHIP
from bayesattn_recipes.language import page as language

ROOT = Path(__file__).parents[2]
RESULTS, BENCHMARKS = ROOT / "docs" / "results", ROOT / "benchmarks" / "results" / "h200"
BEGIN, END = "<!-- table: python docs/site/front.py -->", "<!-- end of table -->"
# GLUE tasks with an AURC and five pairs of soft and trained Bayesian models
TRAINED_TASKS = ("mrpc", "cola", "rte", "sst2", "qnli")
FITTED, LAPLACE = "closed form, scale fitted", "last-layer Laplace: entropy"

GAIN = "it lowered the NLL by {digits_bam}"
ENSEMBLE = "an ensemble of three lowered it by {digits_ensemble}"
LOSS = "mean scores were {loss_low} to {loss_high} points lower, none clearly"
CALIBRATION = (
    "({nll_closed} against {nll_temperature}; p = {nll_p} over models, {nll_p_tasks} over tasks, uncorrected)",
    "No difference in ECE is seen ({ece_closed} against {ece_temperature})",
)
NOT_CLEAR = "no difference seen (p = {trained_p}, uncorrected). Nor is one seen for Laplace (p = {laplace_p} after Holm)"
STEP = "{step_low} to {step_high} times a training step"
# page: the words around its numbers
TEMPLATES: dict[str, tuple[str, ...]] = {
    "README.md": (
        GAIN,
        ENSEMBLE,
        LOSS,
        *CALIBRATION,
        NOT_CLEAR,
        "{tasks} GLUE tasks with {seeds} seeds each. Intervals are over {models} models; over tasks, p = {change_p_tasks}",
    ),
    "docs/index.md": (
        GAIN,
        ENSEMBLE,
        LOSS,
        STEP,
        "On {models} fine-tuned classifiers (one encoder, {tasks} tasks) it lowers the area under the risk-coverage curve "
        "by {change} %",
    ),
    "docs/guides/training.md": (GAIN, ENSEMBLE, LOSS),
    "docs/guides/text-classifier.md": (LOSS,),
    "docs/recipes/index.md": (LOSS,),
    "docs/tutorials/convert_and_fine_tune.py": (LOSS,),
}


def spread(low: float, high: float, digits: int) -> tuple[str, str]:
    """Return the two ends of a range as text; −0 is 0."""
    first, second = (f"{round(end, digits) + 0.0:.{digits}f}" for end in (low, high))
    return first, second


def p_value(differences: Sequence[float]) -> float:
    """Return the p-value of a paired t-test, two-sided and not corrected."""
    return float(stats.ttest_1samp(differences, 0.0)[1])  # type: ignore[arg-type]


def changes(logs: Sequence[float]) -> str:
    """Return the mean relative change of logarithms of ratios, with its 95 % interval."""
    summary = over_runs(logs)
    ends = (summary.value if end is None else end for end in (summary.value, summary.low, summary.high))
    value, low, high = (f"{100.0 * math.expm1(end):+.1f}".replace("-", "−") for end in ends)
    return f"{value} % ({low} to {high})"


def ratios(file: str, provider: str, modes: Sequence[str], cases: str = "", digits: int = 1) -> tuple[str, str]:
    """Return the smallest and the largest ratio of a provider in the cases of a benchmark whose names a pattern finds."""
    rows = [row for row in read_csv(BENCHMARKS / file) if row.provider == provider and row.mode in modes]
    found = [row.ratio for row in rows if re.search(cases, row.case)]
    return spread(min(found), max(found), digits)


def costs() -> str:
    """Return the table of the page on performance: the range of each benchmark's ratios."""

    def between(*which, digits: int = 2) -> str:
        low, high = ratios(*which, digits=digits)
        return low if low == high else f"{low} to {high}"

    time, both, recorded = ("time",), ("fwd+bwd",), ("fwd+bwd, CUDA graph",)
    long, short = "x(2048|4096|16384)x", "x512x"
    body = [
        ["`ba.uncertainty`, BERT-base", "a plain pass", between("doubt.csv", "doubt, kernels", time, digits=1)],
        [
            "the same without kernels, 512 tokens",
            "a plain pass",
            between("doubt.csv", "doubt, torch", time, "n512", digits=1),
        ],
        ["a call, BAM-WC with KL, 2,048 tokens or more", "FlashAttention", between("attention.csv", "BAM-WC", both, long)],
        ["dropout 0.1 in the same calls", "FlashAttention", between("attention.csv", "sdpa flash dropout", both, long)],
        ["BAM-WC with a causal mask, 4,096 tokens", "FlashAttention", between("causal.csv", "BAM-WC", both)],
        ["BAM-WC, 512 tokens, called from Python", "FlashAttention", between("attention.csv", "BAM-WC", both, short)],
        ["the same as a CUDA graph", "FlashAttention", between("attention.csv", "BAM-WC", recorded, short)],
        ["a training step of BERT-base, BAM-WC", "the same, soft", between("step.csv", "BAM-WC", ("plain",), "^bert")],
        ["the same as a CUDA graph", "the same, soft", between("step.csv", "BAM-WC", ("recorded",), "^bert")],
    ]
    return markdown(["on an H200, bfloat16", "as a multiple of", "time"], body)


def trained_logs() -> list[float]:
    """Return ln(AURC of BAM-WC with draws / AURC of soft attention) for every pair of runs."""
    values = language.read_values(RESULTS)
    logs = []
    for task in TRAINED_TASKS:
        soft, ours = (values[task, *key] for key in (("soft", "test", "aurc", False), ("BAM-WC", "test", "aurc", True)))
        logs += [math.log(ours[seed] / soft[seed]) for seed in sorted(soft.keys() & ours.keys())]
    return logs


def numbers() -> dict[str, str]:
    """Return every quoted number as it is written."""
    rows = doubt.read_rows(RESULTS / "doubt.csv")
    pooled = {row.ranking: row for row in doubt.pool(rows)}
    flagship = pooled[FLAGSHIP]
    # in hundredths, with the sign turned
    gains = {e.kind: e.value / 100.0 for e in digits.read(RESULTS).effects if e.group == "digits, 100 NLL, scaled"}
    losses = [-e.value for e in language.read(RESULTS).effects if e.kind == "BAM-WC" and not e.group.endswith("NLL")]
    low, high = spread(min(losses), max(losses), 0)
    step_low, step_high = ratios("step.csv", "BAM-WC", ("plain", "compiled", "recorded"))

    def mean(name: str, measure: str, scale: float = 1.0, places: int = 3) -> str:
        found = [row[measure] for row in rows if row["row"] == name]
        return f"{scale * sum(found) / len(found):.{places}f}"

    own = {(row["task"], row["seed"]): row["nll_scaled"] for row in rows if row["row"] == BASELINE}
    gained: dict[str, list[float]] = {}
    for row in rows:
        if row["row"] == FITTED:
            gained.setdefault(row["task"], []).append(row["nll"] - own[row["task"], row["seed"]])

    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    num_tasks = len({row["task"] for row in rows})
    return {
        "digits_bam": f"{gains['BAM-WC']:.2f}",
        "digits_ensemble": f"{gains['ensemble of 3']:.2f}",
        "loss_low": low,
        "loss_high": high,
        "nll_closed": mean(FITTED, "nll"),
        "nll_temperature": mean(BASELINE, "nll_scaled"),
        "nll_p": f"{p_value([change for found in gained.values() for change in found]):.3f}",
        "nll_p_tasks": f"{p_value([sum(found) / len(found) for found in gained.values()]):.2f}",
        "ece_closed": mean(FITTED, "ece", 100.0, 1),
        "ece_temperature": mean(BASELINE, "ece_scaled", 100.0, 1),
        "trained_p": f"{p_value(trained_logs()):.2f}",
        "laplace_p": f"{pooled[LAPLACE].p_value:.3f}",
        "step_low": step_low,
        "step_high": step_high,
        "models": str(flagship.num_runs),
        "tasks": words[num_tasks],
        "seeds": words[flagship.num_runs // num_tasks],
        "change": f"{-100.0 * flagship.change:.0f}",
        "change_p_tasks": f"{flagship.p_tasks:.3f}",
    }


def table() -> str:
    """Return the README's table: what sorting by something gives, and what it costs."""
    rows = doubt.read_rows(RESULTS / "doubt.csv")
    aurc = {(row["row"], row["task"], row["seed"]): row["aurc"] for row in rows if row["aurc"] is not None}

    def change(name: str) -> str:
        return changes([math.log(value / aurc[BASELINE, *run]) for (row, *run), value in aurc.items() if row == name])

    low, high = ratios("doubt.csv", "doubt, kernels", ("time",))
    found = numbers()
    step, loss = (f"{found[f'{name}_low']} to {found[f'{name}_high']}" for name in ("step", "loss"))
    cost = f"one forward and one backward pass ([{low} to {high}](benchmarks/README.md#what-does-doubt-cost) times a pass)"
    body = [
        ["own confidence", "0", "one pass"],
        ["**closed form**, `ba.uncertainty`", f"**{change(FLAGSHIP).replace(' (', '** (')}", cost],
        ["attention noise, 20 draws", change("attention draws, 20: t"), "20 passes"],
        ["MC dropout, 20 draws", change("MC dropout, 20: t"), "20 passes"],
        ["ensemble of three", change("ensemble of 3"), "three training runs, three passes"],
        ["last-layer Laplace", change(LAPLACE), "a pass over the training data"],
        [
            "training with noise (BAM-WC), 20 draws*",
            changes(trained_logs()),
            f"{step} times a training step, 20 passes; mean scores {loss} points lower, none clearly",
        ],
    ]
    # costs are words, which begin at the left
    return markdown(["sort by", "AURC, change", "what it costs"], body).replace("| --: |\n", "| --- |\n", 1)


def with_table(text: str, written: str) -> str:
    """Put the table between its marks."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"a page with a table must have one block between {BEGIN} and {END}")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n{written.rstrip()}\n{END}{after}"


def with_numbers(text: str, templates: Sequence[str], values: Mapping[str, str]) -> str:
    """Write the numbers into the words around them; line breaks of a page do not matter."""
    for template in templates:
        words = re.split(r"\{(\w+)\}", template)
        # in a script's comment a line begins with a mark
        literal = [re.sub(r"\\? ", r"(?:[ ]|\\n(?:# )?)", re.escape(part)) for part in words[::2]]
        # a full stop after a number is not part of it
        groups = [rf"(?P<{name}>[\w−]+(?:\.\d+)?)" for name in words[1::2]]
        pattern = literal[0] + "".join(group + after for group, after in zip(groups, literal[1:], strict=True))

        def write(match: re.Match[str]) -> str:
            shown, start = match[0], match.start()
            for name in sorted(match.groupdict(), key=match.start, reverse=True):
                value = values[name].capitalize() if match[name][0].isupper() else values[name]
                shown = shown[: match.start(name) - start] + value + shown[match.end(name) - start :]
            return shown

        text, count = re.subn(pattern, write, text)
        if not count:
            raise ValueError(f"a page has lost the words {template!r}. Write them again, or drop the template from front.py")
    return text


def pages() -> dict[Path, str]:
    """Return every page as the files would have it."""
    values = numbers()
    found = {ROOT / page: with_numbers((ROOT / page).read_text("utf-8"), t, values) for page, t in TEMPLATES.items()}
    performance = ROOT / "docs" / "performance" / "index.md"
    return found | {
        ROOT / "README.md": with_table(found[ROOT / "README.md"], table()),
        performance: with_table(performance.read_text("utf-8"), costs()),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
