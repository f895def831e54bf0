"""Compare kinds of attention with equal search effort: the same number of settings for each kind, on validation data.

Runs that are not reported score the settings; the best one is trained again and measured. A cell holds the measures of one
run, kept as a JSON file, so an interrupted comparison continues where it stopped.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jaxtyping import Float, Int
from torch import Tensor

from bayesattn import metrics
from bayesattn.cli.registry import Request
from bayesattn.evaluation.measure import mean_logits
from bayesattn.files import RunError, write_bytes
from bayesattn_recipes.common.cells import run_cells
from bayesattn_recipes.common.tables import (
    Column,
    markdown,
    print_tables,
    write_csv,
)


class Kind(NamedTuple):
    """A row of the comparison.

    Attributes:
        config: Name of the config that it starts from.
        method: How it predicts: `mean`, or draws of `dropout` masks or `attention`.
        grid: Settings to try, each a few `name=value`.
        fixed: Settings common to all of them.
        members: Networks whose predictions are averaged.
    """

    config: str
    method: str
    grid: tuple[tuple[str, ...], ...]
    fixed: tuple[str, ...] = ()
    members: int = 1


class Key(NamedTuple):
    """What identifies a cell: a config, settings on top, and the seeds of its networks."""

    config: str
    settings: tuple[str, ...]
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of its file."""
        settings = (setting.removeprefix("attention.").removeprefix("training.") for setting in self.settings)
        return "_".join((self.config, *settings, "-".join(map(str, self.seeds))))


Cells = dict[Key, dict[str, Any]]
Config = TypeVar("Config")
SCALED = (
    Column("accuracy", "accuracy", 100.0),
    Column("NLL scaled", "scaled_nll", digits=3),
    Column("AURC", "aurc", digits=4),
)


@dataclass(frozen=True)
class Study:
    """Runs cells.

    Attributes:
        run: Trains and measures; a top-level function, called with a key and `arguments`, possibly in another process.
        identity: Returns everything that the measures depend on.
        arguments: Arguments of `run`, after the key.
        request: What was asked for, without variants: all kinds are compared.
    """

    run: Callable[..., dict[str, Any]]
    identity: Callable[[Key], dict[str, Any]]
    arguments: tuple[Any, ...]
    request: Request

    def __post_init__(self) -> None:
        if self.request.variants is not None:
            raise ValueError("a search compares all its kinds. Leave variants out")

    def cells(self, wanted: Iterable[Key]) -> Cells:
        """Return the finished cells; run the missing ones while there is time."""
        found, outcome = run_cells(
            self.request,
            {key.name: key for key in wanted},
            self.identity,
            self.run,
            lambda missing: [(key, *self.arguments) for key in missing],
            is_strict=True,
        )
        if outcome.failures:
            raise RunError(outcome.reasons())
        return found

    def search(self, keys: Mapping[tuple[str, str, str, int], tuple[Key, str]]) -> list[dict[str, Any]]:
        """Return the score of every setting and seed.

        Args:
            keys: From `search_keys`.

        Raises:
            RunError: Not all of them are finished, and there was no time left.
        """
        found = self.cells(key for key, _ in keys.values())
        missing = len({key for key, _ in keys.values()} - found.keys())
        if missing:
            raise RunError(f"{missing} runs of the search are missing. Run the same command with more minutes to continue")
        return [
            {"dataset": dataset, "kind": kind, "setting": setting, "seed": seed,
             "validation_nll": found[key][method]["validation_nll"]}
            for (dataset, kind, setting, seed), (key, method) in keys.items()
        ]  # fmt: skip

    def compare(
        self,
        kinds: Mapping[str, Kind],
        datasets: Sequence[str],
        *,
        search_seeds: Sequence[int],
        measures: Callable[[dict[str, Any]], Sequence[Mapping[str, Any]]],
        seeds: Sequence[int] | None = None,
        prefix: bool = False,
        shared: tuple[str, ...] = (),
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Search, and train the best setting of every kind while there is time.

        Args:
            kinds: The kinds to compare.
            datasets: The data sets to compare them on.
            search_seeds: Seeds of every setting, which are not reported.
            measures: Turns a cell's measures by one method into the rows of a table.
            seeds: Seeds of the best one; None takes those of the request.
            prefix: Whether the names of configs begin with the data set.
            shared: Settings of all runs, beside those of the request.

        Returns:
            The score of every setting and seed; and the rows of the runs that are finished, by data set, kind and seed.

        Raises:
            RunError: There was no time for all runs of the search, or for any run after it.
        """
        seeds, shared = range(self.request.num_seeds) if seeds is None else seeds, (*shared, *self.request.settings)
        search = self.search(search_keys(kinds, datasets, search_seeds, prefix=prefix, shared=shared))
        keys = final_keys(kinds, search, datasets, seeds, prefix=prefix, shared=shared)
        found = self.cells(key for key, _ in keys.values())
        rows = [
            {"dataset": dataset, "kind": kind, "seed": seed, "setting": setting, "settings_tried": len(kinds[kind].grid),
             **{name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}}
            for (dataset, kind, setting, seed), (key, method) in keys.items()
            if key in found
            for row in measures(found[key][method])
        ]  # fmt: skip
        if not rows:
            raise RunError("no run has finished. Run the same command with more minutes to continue")
        rows.sort(key=lambda row: (datasets.index(row["dataset"]), list(kinds).index(row["kind"]), row["seed"]))
        return search, rows

    def table(
        self,
        name: str,
        kinds: Mapping[str, Kind],
        datasets: Sequence[str],
        measures: Sequence[str],
        columns: Sequence[Column] = SCALED,
        **options: Any,
    ) -> Path:
        """Compare kinds and write the files: the named measures of every run, and a table; options as for `compare`."""
        search, rows = self.compare(
            kinds, datasets, measures=lambda found: [{measure: found[measure] for measure in measures}], **options
        )
        return self.write(name, search, rows, columns)

    def write(
        self,
        name: str,
        search: Sequence[dict[str, Any]],
        rows: Sequence[dict[str, Any]],
        columns: Sequence[Column] = SCALED,
        shown: Sequence[dict[str, Any]] | None = None,
    ) -> Path:
        """Write `NAME-search.csv`, `NAME.csv` and the table `NAME.md`, print the table and return its path.

        Args:
            name: Of the files.
            search: From `compare`, like `rows`.
            rows: Of the CSV file.
            columns: Of the table.
            shown: Rows of the table; None takes all.
        """
        out = self.request.out
        write_csv(out / f"{name}-search.csv", search)
        write_csv(out / f"{name}.csv", rows)
        text = comparison_table(rows if shown is None else shown, columns)
        write_bytes(out / f"{name}.md", text.encode())
        print_tables(self.request.console, text)
        return out / f"{name}.md"


def config_loader(
    load_config: Callable[[str, list[str]], Config], settings: Callable[[Key], Sequence[str]] = lambda key: ()
) -> Callable[[Key], Config]:
    """Return a function that loads the config of a cell's first network, and remembers it.

    Args:
        load_config: Loads the config of a name, with settings on top.
        settings: Further settings of a cell.
    """

    @lru_cache(maxsize=4096)
    def load(key: Key) -> Config:
        return load_config(key.config, [*key.settings, *settings(key), f"seed={key.seeds[0]}"])

    return load


def search_keys(
    kinds: Mapping[str, Kind], datasets: Sequence[str], seeds: Sequence[int], *, prefix: bool, shared: tuple[str, ...]
) -> dict[tuple[str, str, str, int], tuple[Key, str]]:
    """Return the cells of a search and how they predict, by data set, kind, setting and seed.

    Args:
        kinds: The kinds to compare.
        datasets: The data sets to compare them on.
        seeds: Seeds of every setting.
        prefix: Whether the names of configs begin with the data set.
        shared: Settings of all runs.
    """
    return {
        (dataset, name, " ".join(setting), seed): (
            Key(_config(dataset, kind, prefix), (*kind.fixed, *setting, *shared), (seed,)),
            kind.method,
        )
        for dataset, (name, kind) in itertools.product(datasets, kinds.items())
        for setting, seed in itertools.product(kind.grid, seeds)
    }


def final_keys(
    kinds: Mapping[str, Kind],
    search: Sequence[Mapping[str, Any]],
    datasets: Sequence[str],
    seeds: Sequence[int],
    *,
    prefix: bool,
    shared: tuple[str, ...],
) -> dict[tuple[str, str, str, int], tuple[Key, str]]:
    """Return the cells of the chosen settings in the same way, seed by seed: an interruption leaves complete pairs."""
    chosen = {
        (dataset, name): best_setting(row for row in search if (row["dataset"], row["kind"]) == (dataset, name))
        for dataset, name in itertools.product(datasets, kinds)
    }
    return {
        (dataset, name, chosen[dataset, name], seed): (
            Key(
                _config(dataset, kind, prefix),
                (*kind.fixed, *chosen[dataset, name].split(), *shared),
                tuple(range(kind.members * seed, kind.members * (seed + 1))),
            ),
            kind.method,
        )
        for seed, dataset, (name, kind) in itertools.product(seeds, datasets, kinds.items())
    }


def _config(dataset: str, kind: Kind, prefix: bool) -> str:
    return f"{dataset}-{kind.config}" if prefix else kind.config


def best_setting(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the `setting` whose mean validation NLL over its rows is smallest; all have the same number of rows."""
    totals: dict[str, float] = {}
    for row in rows:
        totals[row["setting"]] = totals.get(row["setting"], 0.0) + row["validation_nll"]
    return min(totals, key=totals.__getitem__)


def cross_fitted_nll(samples: Float[Tensor, "s n c"], labels: Int[Tensor, " n"]) -> float:
    """Return the NLL of every example, scaled by a temperature fitted on the other half of them.

    Args:
        samples: Class probabilities, draws first.
        labels: Labels of the validation examples.
    """
    mean = mean_logits(samples.double())
    total = 0.0
    for mine, other in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        scaled = metrics.apply_temperature(mean[mine], metrics.fit_temperature(mean[other], labels[other]))
        total -= float(scaled.gather(1, labels[mine, None]).clamp_min(1e-12).log().sum())
    return total / len(labels)


def measure_scaled(
    samples: Mapping[str, Float[Tensor, "s n c"]], labels: Mapping[str, Int[Tensor, " n"]], condition: str
) -> dict[str, float]:
    """Return the measures of a condition, before and after temperature scaling.

    Args:
        samples: Class probabilities by condition, draws first; those of `validation` decide the temperature.
        labels: Labels of the same conditions.
        condition: The condition to measure.
    """
    temperature = metrics.fit_temperature(mean_logits(samples["validation"].double()), labels["validation"])
    scaled = metrics.apply_temperature(mean_logits(samples[condition].double()), temperature)
    # of the mean alone: tests of the draws take longer than the training
    mean = samples[condition].mean(dim=0, keepdim=True)
    plain = metrics.evaluate_predictions(mean, labels[condition], num_resamples=0)
    after = metrics.evaluate_predictions(scaled.unsqueeze(0), labels[condition], num_resamples=0)
    values = {name: plain[name].value for name in ("accuracy", "nll", "aurc")}
    return values | {f"scaled_{name}": after[name].value for name in ("nll", "ece")}


def comparison_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[Column] = SCALED, *, baseline: str = "soft"
) -> str:
    """Return a Markdown table: means over seeds, and paired differences to the baseline.

    Args:
        rows: One per data set, kind and seed, with `setting`, `settings_tried` and the measures.
        columns: The measures to show.
        baseline: The kind that all others are compared with.
    """
    lines = []
    for dataset, kind in dict.fromkeys((row["dataset"], row["kind"]) for row in rows):
        ours, theirs = (
            {row["seed"]: row for row in rows if (row["dataset"], row["kind"]) == (dataset, name)}
            for name in (kind, baseline)
        )
        first = next(iter(ours.values()))
        cells = [dataset, kind, str(len(ours)), str(first["settings_tried"]), first["setting"]]
        for column in columns:
            difference = ["–", "–"] if kind == baseline else column.show_difference(ours, theirs)
            cells += [column.show(ours), *difference]
        lines.append(cells)
    header = ["data set", "attention", "runs", "settings tried", "chosen"]
    for column in columns:
        header += [column.heading, f"difference to {baseline}", "p"]
    return markdown(header, lines)
