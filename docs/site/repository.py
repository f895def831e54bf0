"""mkdocs hook: files of the repository that pages link to, outside docs/, become part of the site.

A Markdown file becomes a page and any other file is copied, both below `repository/`; links are rewritten on the way. A link
to something that does not exist stays as it is, and the strict build stops at it.
"""

import os
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)


def real_path(src_uri: str) -> str:
    """Return where a page of the site is in the repository."""
    return src_uri.removeprefix("repository/") if src_uri.startswith("repository/") else f"docs/{src_uri}"


def place(path: str) -> str:
    """Return where a file of the repository is in the site; a tutorial's script is a page."""
    if path.startswith("docs/tutorials/") and path.endswith(".py"):
        path = path.removesuffix(".py") + ".md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def target(page: str, link: str) -> str | None:
    """Return the repository's file that a link of a page leads to; of a folder, its README."""
    path = os.path.normpath(os.path.join(os.path.dirname(page), link))
    if (ROOT / path).is_dir():
        path = f"{path}/README.md"
    return path if not path.startswith("..") and (ROOT / path).is_file() else None


def prose(text: str) -> str:
    """Return a page without its code and comments."""
    return FENCE.sub("", COMMENT.sub("", text))


def on_files(files, config):
    """Add what pages link to, and what the added pages link to."""
    waiting = [real_path(file.src_uri) for file in files.documentation_pages() if file.generated_by is None]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for _, link in LINK.findall(prose((ROOT / page).read_text(encoding="utf-8"))):
            found = target(page, link)
            if found is None or found.startswith("docs/") or found in seen:
                continue
            seen.add(found)
            files.append(File.generated(config, place(found), abs_src_path=str(ROOT / found)))
            if found.endswith(".md"):
                waiting.append(found)
    return files


def on_page_markdown(markdown, page, config, files):
    """Drop comments (the tests run the code in them) and point links at the files' places in the site."""
    here = page.file.src_uri

    def relink(match):
        found = target(real_path(here), match[2])
        if found is None:
            return match[0]
        return match[1] + os.path.relpath(place(found), os.path.dirname(here))

    text = COMMENT.sub("", markdown)
    parts, last = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(relink, text[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*parts, LINK.sub(relink, text[last:])])
