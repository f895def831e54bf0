"""The support matrix of the docs page, made from the list that the common suite runs; as a script it rewrites the page."""

from pathlib import Path

from zoo import ARCHITECTURES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "make-your-own-bayesian.md"
BEGIN, END = "<!-- support matrix: begin -->", "<!-- support matrix: end -->"


def table() -> str:
    """Return the matrix as Markdown; a tick is a parametrised test of the common suite."""
    columns = (
        "architecture", "modules / calls", "off: exact, sdpa and eager", "sampled, KL, restore, save", "padded",
        "generate: dynamic, static, no cache, beams",
    )  # fmt: skip
    head = f"| {' | '.join(columns)} |"
    rows = [
        f"| {name} | {a.modules} / {a.calls} | ✓ | ✓ | {'✓' if a.can_pad else '–'} | {'✓' if a.generates else '–'} |"
        for name, a in ARCHITECTURES.items()
    ]
    return "\n".join([head, "|---|---|---|---|---|---|", *rows])


def with_table(page: str) -> str:
    """Return the page with the matrix between its two markers replaced."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
