"""mkdocs hook: the tutorials that `make tutorials` has executed become pages, their pictures files of the site."""

from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
EXECUTED = ROOT / "build" / "tutorials"


def on_files(files, config):
    """Add every executed tutorial; one that was not executed is an error."""
    for script in sorted((ROOT / "docs" / "tutorials").glob("*.py")):
        if not (EXECUTED / f"{script.stem}.md").exists():
            raise PluginError(f"docs/tutorials/{script.name} has not been executed; run: make tutorials")
        for path in sorted(EXECUTED.glob(f"{script.stem}*")):
            files.append(File.generated(config, f"tutorials/{path.name}", abs_src_path=str(path)))
    return files
