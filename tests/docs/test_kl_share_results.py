"""The table of what the KL's share costs is the mean of its CSV, and the default is what it recommends."""

import csv
import re
from pathlib import Path
from statistics import fmean

import pytest

from bayesattn.objective import MAX_SHARE

GUIDES = ("choosing", "text-classifier")
SHARES = ("0", "0.001", "0.005", "0.01", "0.02", "0.05", "0.1", "0.3")
DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("task", ["SST-2", "MRPC", "RTE"])
def test_table_of_shares_is_the_mean_of_the_runs(task):
    with (DOCS / "results" / "kl-share.csv").open(newline="") as file:
        runs = [row for row in csv.DictReader(file) if row["task"] == task.replace("-", "").lower()]

    def accuracy(**wanted: str) -> float:
        return 100 * fmean(float(row["accuracy"]) for row in runs if all(row[key] == value for key, value in wanted.items()))

    line = re.search(rf"^ *\| {task}.*$", (DOCS / "concepts" / "kl.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert line is not None
    shown = [float(cell) for cell in re.findall(r"\| (\d\d\.\d)\b", line[0])]
    soft = accuracy(method="soft")
    shares = {share: accuracy(cap="each batch", max_share=share) for share in SHARES}
    plain = [accuracy(cap="none", final=final) for final in ("1", "0.0001")]
    assert shown == pytest.approx([soft, *shares.values(), *plain], abs=0.0501)
    assert soft - shares[str(MAX_SHARE)] < 0.5


def test_guides_give_the_mutual_information_of_the_default_noise():
    with (DOCS / "results" / "kl-share.csv").open(newline="") as file:
        runs = [row for row in csv.DictReader(file) if row["max_share"] and 0.0 < float(row["max_share"]) <= MAX_SHARE]
    found = [float(row["mutual_information"]) for row in runs]
    for guide in GUIDES:
        text = " ".join((DOCS / "guides" / f"{guide}.md").read_text(encoding="utf-8").split())
        assert f"{min(found):.3f} to {max(found):.3f} nats" in text
