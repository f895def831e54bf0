"""Execute one tutorial and write it as a page.

    python docs/site/execute.py docs/tutorials/NAME.py build/tutorials

The script is in jupytext's percent format. Written are NAME.ipynb with its outputs, NAME.md for the site, and its pictures.
A cell that draws says what is to be seen: `# %% alt="…"`.
"""

import base64
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")


def output_lines(output, cell, stem: str, pictures: list[bytes]) -> list[str]:
    """Return one output of a cell as Markdown; pictures are collected."""
    if output.output_type == "stream":
        # progress and warnings stay in the notebook
        return [] if output.name == "stderr" else ["```text", TERMINAL_CODES.sub("", output.text).rstrip(), "```", ""]
    data = output.get("data", {})
    if "image/png" in data:
        alt = cell.metadata.get("alt")
        if not alt:
            raise ValueError(f'a cell draws but does not say what: begin it with # %% alt="…"\n{cell.source}')
        pictures.append(base64.b64decode(data["image/png"]))
        return [f"![{alt}]({stem}-{len(pictures)}.png)", ""]
    if "text/markdown" in data:
        return [data["text/markdown"], ""]
    return ["```text", data["text/plain"], "```", ""]


def join_streams(outputs: list) -> None:
    """Make one output of what a cell prints in several pieces."""
    for first, second in zip(outputs[-2::-1], outputs[:0:-1], strict=True):
        if first.output_type == second.output_type == "stream" and first.name == second.name:
            first.text += second.text
            outputs.remove(second)


def page(notebook, stem: str) -> tuple[str, list[bytes]]:
    """Return an executed notebook as Markdown, and its pictures."""
    lines: list[str] = []
    pictures: list[bytes] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            lines += [cell.source, ""]
            if cell.source.startswith("# "):
                lines += [f"*This page is an executed notebook: [{stem}.ipynb]({stem}.ipynb).*", ""]
            continue
        lines += ["```python", cell.source, "```", ""]
        join_streams(cell.outputs)
        shown = [line for output in cell.outputs for line in output_lines(output, cell, stem, pictures)]
        if shown:
            lines += ['<div class="tutorial-output" markdown>', "", *shown, "</div>", ""]
    return "\n".join(lines), pictures


def main(script: Path, out: Path) -> None:
    """Execute and write; the page comes last, so its presence means that the rest is there."""
    start = time.monotonic()
    notebook = jupytext.read(script)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    # a kernel that this process starts inherits its environment, and finds the commands beside this Python
    commands = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    os.environ.update(PATH=commands, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    os.environ.pop("MPLBACKEND", None)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
    text, pictures = page(notebook, script.stem)
    out.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, out / f"{script.stem}.ipynb")
    for number, picture in enumerate(pictures, 1):
        (out / f"{script.stem}-{number}.png").write_bytes(picture)
    (out / f"{script.stem}.md").write_text(text, encoding="utf-8")
    print(f"{script.name}: {len(pictures)} pictures, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
