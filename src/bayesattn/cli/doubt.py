"""`bayesattn doubt`: the texts that a classifier in a local folder is least certain about, and why."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text as RichText

from bayesattn.files import replacing
from bayesattn.optional import needs_extra

if TYPE_CHECKING:
    from bayesattn.integrations.hf.doubt import TextDoubt

# share of the variance at which a word gets the darkest shade
DARKEST = 0.25

Text = str | tuple[str, str]


def read_texts(source: str) -> dict[int, Text]:
    """Return the texts of a file or, for `-`, of standard input, by line number; a tab makes a line a pair of texts."""
    name = "standard input" if source == "-" else source
    try:
        content = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{name} is not UTF-8: byte {byte:#x} at position {error.start}. Save it as UTF-8") from error
    texts: dict[int, Text] = {}
    # a byte order mark is no text; splitlines would also cut at form feeds and Unicode's separators
    for number, line in enumerate(content.removeprefix("\ufeff").split("\n"), start=1):
        if line.strip():
            first, tab, second = line.partition("\t")
            if tab and not (first.strip() and second.strip()):
                raise ValueError(f"{name}, line {number}: a pair needs a text before and after the tab, got {line!r}")
            texts[number] = (first, second) if tab else line
    if not texts:
        raise ValueError(f"{name} has no text. Write one per line")
    if len({isinstance(text, str) for text in texts.values()}) > 1:
        raise ValueError("some lines have a tab and some have none. Give one text per line, or a pair per line, not both")
    return texts


def doubt_of_folder(folder: Path, texts: list[Text], *, batch_size: int) -> Iterator["TextDoubt"]:
    """Yield the doubt of every text under the sequence classifier in a folder; nothing is downloaded."""
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} has no config.json. Give the folder of a Hugging Face model, as save_pretrained writes it"
        )
    with needs_extra("bayesattn doubt", "hf"):
        from transformers import AutoModelForSequenceClassification

        from bayesattn.integrations.hf.doubt import doubt_texts
    try:
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except OSError as error:
        advice = "Only safetensors are read: load the model yourself and call model.save_pretrained(folder)"
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"the weights in {folder} cannot be loaded: {reason}. {advice}") from error
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
        raise ValueError(f"no tokenizer in {folder}: {' '.join(str(error).split()).rstrip('.')}. {advice}") from error
    # without files transformers makes up many a fast tokenizer, which knows special tokens alone
    files = sorted({"tokenizer.json", *tokenizer.vocab_files_names.values()})
    if tokenizer.is_fast and not any((folder / name).is_file() for name in files):
        raise ValueError(f"no tokenizer in {folder}: it has none of {', '.join(files)}. {advice}")
    return tokenizer


def as_row(line: int, found: "TextDoubt") -> dict:
    """Return a row for JSON lines."""
    names = ("text", "label", "probability", "margin", "std", "t", "special", "is_cut")
    row = {name: getattr(found, name) for name in names}
    # JSON has no infinity
    row["t"] = row["t"] if math.isfinite(row["t"]) else None
    return {"line": line, **row, "words": [[word, round(share, 4)] for word, share in found.words]}


def show_t(t: float) -> str:
    """Return t for people; it is infinite where no attention score moves the answer."""
    return f"{t:.1f}" if math.isfinite(t) else "∞"


def print_rows(rows: dict[int, "TextDoubt"], console: Console, *, as_json: bool) -> None:
    """Print JSON lines, or a table whose doubtful words are shaded; the rows are by line number."""
    if as_json:
        for line, row in rows.items():
            print(json.dumps(as_row(line, row), ensure_ascii=False, allow_nan=False))
        return
    # without styles reverse text would look like any other
    shown, star = ("*stars*", "*") if console.color_system is None else ("reverse", "")
    table = Table("t", "label", "probability", f"text, the doubtful words in {shown}", box=None, pad_edge=False)
    for row in rows.values():
        text = RichText()
        for piece, share in row.pieces:
            printable = "".join(c if c.isprintable() else " " for c in piece)
            text.append(*((f"{star}{printable}{star}", "reverse") if share >= DARKEST / 2 else (printable, "")))
        text.append(" [cut]" if row.is_cut else "")
        table.add_row(show_t(row.t), RichText(row.label), f"{row.probability:.3f}", text)
    console.print(table)
    console.print("Least certain first. t = margin / standard deviation under attention noise.", highlight=False)
    cut = sum(row.is_cut for row in rows.values())
    if cut:
        note = "are longer than the model reads and were scored on their beginning; they are marked [cut]."
        console.print(f"{cut} of {len(rows)} texts {note}", highlight=False, markup=False, soft_wrap=True)


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
