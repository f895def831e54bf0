"""Rewrite the tables and the plot of benchmarks/README.md from the CSV files under benchmarks/results.

python benchmarks/tables.py
"""

import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from bayesattn.plots.style import COLORS, MARKERS
from bayesattn_recipes.bench.harness import Row, read_csv

FOLDER = Path(__file__).parent
# provider and mode of a column; its heading
Column = tuple[str, str, str]
RECORDED = "train step, CUDA graph"

ATTENTION: list[Column] = [
    ("sdpa flash dropout", "fwd+bwd", "dropout 0.1"),
    ("sdpa cudnn", "fwd+bwd", "cuDNN"),
    ("BAM-WC", "fwd+bwd", "BAM-WC"),
    ("BAM-LC", "fwd+bwd", "BAM-LC"),
    ("BAM-WC", "fwd+bwd, CUDA graph", "BAM-WC, recorded"),
    ("BAM-WC", "forward", "BAM-WC, forward"),
    ("observe", "forward", "`observe`"),
]
CAUSAL: list[Column] = [
    *((name, "fwd+bwd", name) for name in ("BAM-NOKL", "BAM-WC", "BAM-LC")),
    ("sdpa, same mask", "fwd+bwd", "SDPA, same mask"),
    ("BAM-WC", "forward", "BAM-WC, forward"),
    ("observe", "forward", "`observe`"),
]
STEP: list[Column] = [
    (name, mode, f"{name}, {mode}") for mode in ("plain", "compiled", "recorded") for name in ("BAM-NOKL", "BAM-WC")
]
TABLES: dict[str, tuple[str, str, str, list[Column]]] = {
    "attention": ("h200/attention.csv", "b × h × n × d", "cuda", ATTENTION),
    "doubt": (
        "h200/doubt.csv",
        "model, batch, tokens",
        "cuda",
        [
            ("doubt, kernels", "time", "kernels"),
            ("doubt, torch", "time", "plain torch"),
            ("doubt, kernels", "memory", "memory, kernels"),
        ],
    ),
    "causal": ("h200/causal.csv", "causal, b × h × n × d", "cuda", CAUSAL),
    "step": ("h200/step.csv", "model, batch × tokens", "cuda", STEP),
    "step-cpu": ("cpu/step.csv", "model, batch × tokens", "cpu", STEP[:2]),
    "graph": (
        "h200/graph.csv",
        "nodes, edges, input features",
        "cuda",
        [
            *((f"{name} triton", "fwd+bwd", name) for name in ("BAM-NOKL", "BAM-WC")),
            *((f"{name} triton", "fwd+bwd, CUDA graph", f"{name}, recorded") for name in ("BAM-NOKL", "BAM-WC")),
            ("BAM-NOKL triton", "forward", "BAM-NOKL, forward"),
        ],
    ),
    "graph-cpu": (
        "cpu/graph.csv",
        "nodes, edges, input features",
        "cpu",
        [
            *((f"{name} csr", "fwd+bwd", name) for name in ("BAM-NOKL", "BAM-WC")),
            ("BAM-NOKL csr", "forward", "BAM-NOKL, forward"),
        ],
    ),
    "vision": (
        "h200/vision.csv",
        "model, recorded step",
        "cuda",
        [(name, RECORDED, name) for name in ("BAM-NOKL", "BAM-WC", "soft, again")],
    ),
}
# rows of the plot: its tables, and the columns of BAM-NOKL and BAM-WC in each
PLOTTED = {
    "attention": ("fwd+bwd",),
    "causal": ("fwd+bwd",),
    "step": ("plain", "compiled", "recorded"),
    "vision": (RECORDED,),
}


def read(path: str) -> list[Row]:
    """Return the rows of a file under results, none if it has not been measured."""
    file = FOLDER / "results" / path
    return read_csv(file) if file.exists() else []


def table(name: str) -> str:
    """Return a table in Markdown: one row per case, ratios to the baseline of the case; empty columns are left out."""
    path, heading, device, columns = TABLES[name]
    rows = read(path)
    found = {(row.case, row.provider, row.mode): f"{row.ratio:.2f}" for row in rows}
    columns = [column for column in columns if any((row.provider, row.mode) == column[:2] for row in rows)]
    if not columns:
        suite = Path(path).stem
        return f"Not measured yet: `bayesattn bench {suite} --device {device} --out benchmarks/results/{path}`."
    lines = [f"| {heading} | {' | '.join(title for *_, title in columns)} |", "|---" + "|--:" * len(columns) + "|"]
    for case in dict.fromkeys(row.case for row in rows):
        cells = [found.get((case, provider, mode), "–") for provider, mode, _ in columns]
        if any(cell != "–" for cell in cells):
            lines.append(f"| {show(case)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def show(case: str) -> str:
    """Return a case in its usual notation."""
    graph = re.fullmatch(r"(\d+)n (\d+)e (\d+)f", case)
    if graph:
        return ", ".join(f"{int(number):,}" for number in graph.groups())
    return re.sub(r"(?<=[\d)])x(?=\d)", " × ", case)


def pages(text: str) -> str:
    """Return a page with all of its tables updated from the files."""
    for name in TABLES:
        pattern = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, name=name: match[1] + table(name) + "\n" + match[2], text)
        if count != 1:
            raise ValueError(f"the page has {count} tables named {name!r}; it must have one")
    return text


def plot() -> Figure:
    """Draw the ratios of BAM-NOKL and BAM-WC in the most important tables, one line per case."""
    lines: list[tuple[str, dict[str, float]]] = []
    for name, modes in PLOTTED.items():
        rows = read(TABLES[name][0])
        for mode in modes:
            for case in dict.fromkeys(row.case for row in rows if row.mode == mode):
                here = [row for row in rows if (row.case, row.mode) == (case, mode)]
                label = show(case) + (f", {mode}" if name == "step" else ", causal" if name == "causal" else "")
                lines.append((label, {row.provider: row.ratio for row in here}))
    figure = Figure(figsize=(7.0, 0.24 * len(lines) + 0.9), layout="constrained", dpi=144)
    ax = figure.subplots()
    for provider, color, marker in zip(("BAM-NOKL", "BAM-WC"), COLORS, MARKERS, strict=False):
        _dots(ax, lines, provider, color, marker)
    ax.axvline(1.0, color="black", linewidth=0.8)
    ax.set_yticks(range(len(lines)), [label for label, _ in lines], fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("time as a multiple of the same with soft attention, H200", fontsize=9)
    ax.grid(axis="x", linewidth=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8, frameon=False)
    return figure


def _dots(ax, lines: Sequence[tuple[str, dict[str, float]]], provider: str, color: str, marker: str) -> None:
    points = [(ratios[provider], position) for position, (_, ratios) in enumerate(lines) if provider in ratios]
    ax.plot([x for x, _ in points], [y for _, y in points], marker, color=color, markersize=5, label=provider)


if __name__ == "__main__":
    readme = FOLDER / "README.md"
    readme.write_text(pages(readme.read_text(encoding="utf-8")), encoding="utf-8")
    plot().savefig(FOLDER / "results" / "h200" / "ratios.png", metadata={"Software": None})
