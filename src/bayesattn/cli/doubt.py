"""`bayesattn doubt`: the texts that a classifier in a local folder is least certain about, and why."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bayesattn.files import replacing
from bayesattn.optional import needs_extra

if TYPE_CHECKING:
    from bayesattn.integrations.hf.doubt import TextDoubt

# share of the variance at which a word gets the darkest shade
DARKEST = 0.25


def read_texts(source: str) -> list[str | tuple[str, str]]:
    """Return the lines of a file or, for `-`, of standard input; a tab makes a line a pair of texts."""
    lines = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    texts: list[str | tuple[str, str]] = []
    for line in lines.splitlines():
        if line.strip():
            first, tab, second = line.partition("\t")
            texts.append((first, second) if tab else line)
    if not texts:
        raise ValueError(f"{'standard input' if source == '-' else source} has no text. Write one per line")
    if len({isinstance(text, str) for text in texts}) > 1:
        raise ValueError("some lines have a tab and some have none. Give one text per line, or a pair per line, not both")
    return texts


def doubt_of_folder(folder: Path, texts: list[str | tuple[str, str]], *, batch_size: int) -> Iterator["TextDoubt"]:
    """Yield the doubt of every text under the sequence classifier in a folder; nothing is downloaded."""
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} has no config.json. Give the folder of a Hugging Face model, as save_pretrained writes it"
        )
    with needs_extra("bayesattn doubt", "hf"):
        from transformers import AutoModelForSequenceClassification

        from bayesattn.integrations.hf.doubt import doubt_texts
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, output_loading_info=True
    )
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise ValueError(
            f"{folder} has no trained sequence classifier: {', '.join(missing[:3])} would be random; fine-tune it first"
        )
    yield from doubt_texts(model.eval(), _load_tokenizer(folder), texts, batch_size=batch_size)


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    advice = "Save the model's own there: tokenizer.save_pretrained(folder)"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer in {folder}: {' '.join(str(error).split())}. {advice}") from error
    # without files transformers makes up many a fast tokenizer, which knows special tokens alone
    files = sorted({"tokenizer.json", *tokenizer.vocab_files_names.values()})
    if tokenizer.is_fast and not any((folder / name).is_file() for name in files):
        raise ValueError(f"no tokenizer in {folder}: it has none of {', '.join(files)}. {advice}")
    return tokenizer


def as_row(found: "TextDoubt") -> dict:
    """Return a row for JSON lines."""
    row = {name: getattr(found, name) for name in ("text", "label", "probability", "margin", "std", "t", "special")}
    # JSON has no infinity
    row["t"] = row["t"] if math.isfinite(row["t"]) else None
    return {**row, "words": [[word, round(share, 4)] for word, share in found.words]}


def show_t(t: float) -> str:
    """Return t for people; it is infinite where no attention score moves the answer."""
    return f"{t:.1f}" if math.isfinite(t) else "∞"


def print_rows(rows: list["TextDoubt"], console: Console, *, as_json: bool) -> None:
    """Print JSON lines, or a table whose doubtful words are shaded."""
    if as_json:
        for row in rows:
            print(json.dumps(as_row(row), ensure_ascii=False, allow_nan=False))
        return
    table = Table("t", "label", "probability", "text, the doubtful words in reverse", box=None, pad_edge=False)
    for row in rows:
        text = Text()
        for piece, share in row.pieces:
            text.append("".join(c if c.isprintable() else " " for c in piece), "reverse" if share >= DARKEST / 2 else "")
        table.add_row(show_t(row.t), Text(row.label), f"{row.probability:.3f}", text)
    console.print(table)
    console.print("Least certain first. t = margin / standard deviation under attention noise.", highlight=False)


def write_page(rows: list["TextDoubt"], path: Path, *, title: str) -> None:
    """Write the page: every text with its words shaded by their share of the variance, layers and heads as a small map."""
    with needs_extra("bayesattn doubt --html", "cli"):
        import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bayesattn.cli"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("doubt.html").render(rows=rows, title=title, darkest=DARKEST, show_t=show_t)
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
