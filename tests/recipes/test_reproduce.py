"""The engine behind all tables: what is finished is read, the rest is run seed by seed, and nothing is mixed up."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from bayesattn.cli.registry import Request
from bayesattn.files import RunError
from bayesattn_recipes.common.reproduce import Runs, collect, run_plans

CONSOLE = Console(file=io.StringIO())


class Counted:
    """Runs whose one measure says which they were; some fail."""

    def __init__(self, setting: str = "first", failing: tuple[tuple[str, int], ...] = ()) -> None:
        self.setting, self.failing, self.begun = setting, failing, []

    def identity(self, variant, seed):
        return {"variant": variant, "seed": seed, "setting": self.setting}

    def run(self, variant, seed, folder: Path, on_progress):
        self.begun.append(folder.name)
        on_progress(1, 2)
        if (variant, seed) in self.failing:
            raise RuntimeError("out of memory")
        return {"measure": 10 * seed}


def run(plans, out, **options):
    return run_plans(Request(out=out, console=CONSOLE), plans, **options)


def test_runs_of_all_data_sets_begin_seed_by_seed_and_once(tmp_path):
    work = Counted()
    plans = [Runs("a", work, {"soft": 2, "wc": 1}), Runs("b", work, {"soft": 2})]
    found, _ = run(plans, tmp_path)
    assert work.begun == ["a-soft-0", "a-wc-0", "b-soft-0", "a-soft-1", "b-soft-1"]
    assert found["a"] == {"soft": {0: {"measure": 0}, 1: {"measure": 10}}, "wc": {0: {"measure": 0}}}
    again, _ = run(plans, tmp_path, on_missing=lambda plans: pytest.fail("nothing is missing"))
    assert again == found
    assert len(work.begun) == 5


def test_only_plans_with_missing_runs_are_prepared(tmp_path):
    work, seen = Counted(), []
    plans = [Runs("a", work, {"soft": 1}), Runs("b", work, {"soft": 1})]
    run(plans[:1], tmp_path)
    run(plans, tmp_path, on_missing=seen.extend)
    assert seen == plans[1:]


def test_failed_run_leaves_its_traceback_and_the_others(tmp_path):
    work = Counted(failing=(("soft", 0),))
    plan = Runs("a", work, {"soft": 2})
    found, outcome = run([plan], tmp_path)
    assert list(outcome.failures) == ["a-soft-0"]
    assert found == {"a": {"soft": {1: {"measure": 10}}}}
    assert "out of memory" in (tmp_path / "failures" / "a-soft-0.txt").read_text()
    with pytest.raises(RuntimeError, match="out of memory"):
        run([plan], tmp_path, is_strict=True)


def test_other_settings_are_refused_before_anything_runs(tmp_path):
    run([Runs("a", Counted(), {"wc": 1})], tmp_path)
    work = Counted("second")
    with pytest.raises(RunError, match=r"a-wc-0\.json was run with other settings \(setting\)"):
        run([Runs("a", work, {"soft": 1, "wc": 1})], tmp_path)
    assert not work.begun


def test_table_without_its_required_row_is_refused(tmp_path):
    request = Request(out=tmp_path, console=CONSOLE, minutes=0.0)
    with pytest.raises(RunError, match=r"no run of a-soft has finished. Run the same command with more minutes to continue"):
        collect(request, "a", ["soft", "wc"], Counted(), required="soft")
