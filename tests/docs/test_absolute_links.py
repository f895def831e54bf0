"""On PyPI the links of the README lead into the repository."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("absolute_links", ROOT / "docs" / "site" / "absolute_links.py")
assert SPEC is not None
assert SPEC.loader is not None
links = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(links)
PLACE = "https://github.com/owner/name"


def test_pictures_are_raw_and_everything_else_is_a_page():
    text = "![a picture](docs/a.png) [page](docs/b.md#c) [paper](https://arxiv.org/abs/1) [below](#install)"
    assert links.absolute(text, f"{PLACE}/", "v1.2.3") == (
        f"![a picture]({PLACE}/raw/v1.2.3/docs/a.png) [page]({PLACE}/blob/v1.2.3/docs/b.md#c) "
        "[paper](https://arxiv.org/abs/1) [below](#install)"
    )


def test_no_relative_link_of_the_readme_is_left():
    text = links.absolute((ROOT / "README.md").read_text(encoding="utf-8"), PLACE, "v1.2.3")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(targets) > 10
    assert [target for target in targets if not target.startswith("https://")] == []


def test_the_workflow_that_publishes_runs_it_before_it_builds():
    steps = (ROOT / ".github" / "workflows" / "publish.yml").read_text(encoding="utf-8")
    assert 0 < steps.index("docs/site/absolute_links.py") < steps.index("make package")
