"""Point the relative links of README.md at a repository, for PyPI, which has only that one file.

    python docs/site/absolute_links.py https://github.com/OWNER/NAME v0.1.0

The workflow that publishes a release runs it before it builds; the change is not committed.
"""

import re
import sys
from pathlib import Path

LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?!https?:|mailto:|#)([^)\s]+)")


def absolute(text: str, repository: str, revision: str) -> str:
    """Return a page whose links lead to files of a revision; pictures lead to the files themselves."""

    def write(match: re.Match[str]) -> str:
        kind = "raw" if match[1] else "blob"
        return f"{match[1]}{match[2]}{repository.rstrip('/')}/{kind}/{revision}/{match[3]}"

    return LINK.sub(write, text)


if __name__ == "__main__":
    page = Path(__file__).parents[2] / "README.md"
    page.write_text(absolute(page.read_text(encoding="utf-8"), *sys.argv[1:]), encoding="utf-8")
