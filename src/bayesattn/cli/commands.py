"""The commands. Each parses its arguments, calls one function of the library and prints what it returns."""

import dataclasses
import inspect
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bayesattn import __version__
from bayesattn.cli import printing, registry

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
console = Console()

DATA_VARIABLE = "BAYESATTN_DATA"
DataOption = Annotated[
    Path | None, typer.Option(envvar=DATA_VARIABLE, help="Folder of the data sets, for recipes that read files.")
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]


def _show_version(is_asked: bool) -> bool:
    if is_asked:
        print(f"bayesattn {__version__}")
        raise typer.Exit
    return is_asked


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Find out which answers of an attention model to trust.

    Start with `bayesattn doubt` on your own classifier or, if the recipes are installed, with `bayesattn demo`. The other
    commands train and compare the models of the recipes.
    """


@app.command()
def doubt(
    model: Annotated[Path, typer.Option(help="Folder of a Hugging Face sequence classifier.")],
    text: Annotated[str, typer.Option(help="A file with one text per line (a tab makes a pair), or - for standard input.")],
    most: Annotated[int | None, typer.Option(min=1, help="Show this many texts at most.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead of a table.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write a page with the words shaded.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts per pass.")] = 16,
) -> None:
    """Sort texts by how little a classifier can be trusted on them.

    The model is used as it is; nothing is trained or downloaded.
    """
    from bayesattn.cli import doubt as texts

    read = texts.read_texts(text)
    found = zip(read, texts.doubt_of_folder(model, list(read.values()), batch_size=batch_size), strict=True)
    rows = dict(sorted(found, key=lambda item: item[1].t)[:most])
    texts.print_rows(rows, console, as_json=as_json)
    if html is not None:
        texts.write_page(list(rows.values()), html, title=model.resolve().name)
        if not as_json:
            console.print(f"The page is {html}", highlight=False, soft_wrap=True)


@app.command("list")
def list_recipes() -> None:
    """Show the recipes and their configs."""
    found = registry.installed()
    if not found:
        console.print(f"No recipe is installed. Get the paper's with: {registry.INSTALL}", highlight=False, soft_wrap=True)
        return
    for recipe in found.values():
        console.print(printing.recipe(recipe))
    console.print("Train one with: bayesattn train RECIPE --config CONFIG --out FOLDER", highlight=False)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe of `bayesattn list`.")],
    config: Annotated[str, typer.Option(help="A config of the recipe, or the path of a YAML file.")],
    out: Annotated[Path, typer.Option(help="The run folder to write.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Override a config value; may be repeated.")
    ] = None,
    data: DataOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run that is already in the folder.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run in the folder.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write the log for TensorBoard.")] = False,
) -> None:
    """Train one model of a recipe. Ctrl-C saves its run folder, --resume continues."""
    from bayesattn.cli.progress import is_first_process, show_steps

    found = registry.find(recipe)
    module = found.load("train")
    chosen = module.load_config(config, settings or [])
    _check_data(data, found, dataclasses.asdict(chosen))
    try:
        with show_steps("training", console) as on_progress:
            log = module.train_run(
                chosen, out, on_progress, data=data, overwrite=overwrite, resume=resume, tensorboard=tensorboard
            )
    except KeyboardInterrupt as interrupt:
        # a recipe that has saved its run says how to continue; typer would swallow the message
        print(f"bayesattn: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        raise typer.Exit(getattr(interrupt, "exit_code", 130)) from None
    if is_first_process():
        console.print(printing.last_row(log.rows[-1]))
        console.print(f"run: {out}", soft_wrap=True)


@app.command()
def evaluate(
    run: RunArgument,
    samples: Annotated[int, typer.Option(min=2, help="Draws per prediction.")] = 20,
    noise: Annotated[str, typer.Option(help="Strengths of the noisy test sets, in deviations of the data.")] = "0.5,1",
    method: Annotated[
        list[str] | None, typer.Option(help="mean, attention, dropout or attention+dropout; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    data: DataOption = None,
    resamples: Annotated[int, typer.Option(min=0, help="Bootstrap resamples behind every interval.")] = 1000,
) -> None:
    """Measure a run on its test sets.

    Writes metrics.json into the run folder and prints its table.
    """
    from bayesattn.cli.progress import progress
    from bayesattn.evaluation.report import measure_run
    from bayesattn.evaluation.runs import METRICS_FILE, read_run, write_predictions
    from bayesattn.evaluation.threads import one_thread

    strengths = _numbers("noise", noise)
    found = read_run(run)
    recipe = registry.find(found["recipe"])
    module = recipe.load("evaluate")
    _check_data(data, recipe, found["config"])
    # a recipe with its own metrics measures its runs itself
    measure = getattr(module, "measure_run", measure_run)
    with progress(console) as display, one_thread():
        task = display.add_task("predicting", total=None)
        predictions = module.predict_run(
            run,
            num_samples=samples,
            noise=strengths,
            methods=method,
            seed=seed,
            data=data,
            on_progress=lambda done, total: display.update(task, completed=done, total=total),
        )
        write_predictions(run, predictions)
        task = display.add_task("measuring", total=None)
        measured = measure(
            run,
            num_resamples=resamples,
            on_progress=lambda done, total: display.update(task, completed=done, total=total),
        )
    console.print(printing.metrics(measured))
    console.print(f"metrics: {run / METRICS_FILE}", soft_wrap=True)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN ...]", help="Run folders to compare.")],
    out: Annotated[Path | None, typer.Option(help="The page to write; default: report.html in the first run.")] = None,
) -> None:
    """Write one self-contained HTML page that compares runs."""
    from bayesattn.evaluation.report import write_report
    from bayesattn.evaluation.runs import REPORT_FILE

    with console.status("drawing"):
        page = write_report(runs, runs[0] / REPORT_FILE if out is None else out)
    console.print(f"report: {page}", soft_wrap=True)


@app.command()
def reproduce(
    recipe: Annotated[str, typer.Argument(help="A recipe of `bayesattn list` with a table in the paper.")],
    only: Annotated[
        str | None, typer.Option("--datasets", "--tasks", help="Data sets or tasks, separated by commas; default: all.")
    ] = None,
    variants: Annotated[
        str | None, typer.Option(help="Variants, separated by commas, as wc or BAM-WC; default: all.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per variant.")] = registry.Request.num_seeds,
    data: DataOption = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the runs and the tables; finished runs in it are not repeated.")
    ] = Path("runs/reproduce"),
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time, for recipes that can.")] = 1,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.0, help="Begin no run after this time, for recipes that can; run again to continue."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Override a config value; may be repeated.")
    ] = None,
    noise: Annotated[str | None, typer.Option(help="Strengths of shifted test sets, for recipes that can.")] = None,
    splits: Annotated[
        int | None, typer.Option(min=1, help="Random splits in place of the public one, for recipes that can.")
    ] = None,
    search: Annotated[
        bool,
        typer.Option("--search", help="Tune every row over the same number of settings, for recipes that can."),
    ] = False,
    from_csv: Annotated[
        Path | None,
        typer.Option(help="Train nothing: rebuild figure and table of the results page in this folder from its CSV files."),
    ] = None,
) -> None:
    """Train all rows of a table in the paper and print both tables.

    Every variant is trained with several seeds.
    """
    if from_csv is not None:
        page = registry.find(recipe).load("page").rebuild(from_csv)
        console.print(f"page: {page}", soft_wrap=True)
        return
    module = registry.find(recipe).load("reproduce")
    names, chosen = (None if text is None else text.split(",") for text in (only, variants))
    request = registry.Request(
        names=names, variants=chosen, num_seeds=seeds, data=data, out=out, console=console, settings=settings or (),
        jobs=jobs, minutes=minutes,
    )  # fmt: skip
    given = {"noise": None if noise is None else _numbers("noise", noise), "search": search or None, "splits": splits}
    options = {name: value for name, value in given.items() if value is not None}
    unknown = sorted(options.keys() - inspect.signature(module.reproduce).parameters.keys())
    if unknown:
        raise ValueError(f"recipe {recipe!r} does not take {', '.join(unknown)}. Leave the option out")
    table = module.reproduce(request, **options)
    console.print(f"table: {table}", soft_wrap=True)


@app.command()
def doctor() -> None:
    """Show versions, devices and backends."""
    from bayesattn.cli.backends import backends
    from bayesattn.evaluation.runs import environment

    console.print(printing.environment(environment()))
    console.print(printing.backends(backends()))


def _check_data(data: Path | None, recipe: registry.Recipe, config: dict[str, Any]) -> None:
    """Refuse a --data that would not be read; the environment variable serves all recipes, so it may go unused."""
    is_asked_for = data is not None and str(data) != os.environ.get(DATA_VARIABLE)
    if is_asked_for and not recipe.reads_files(config):
        raise ValueError(
            f"data is {str(data)!r}, but recipe {recipe.name!r} reads no files with this config. Leave --data out, or "
            "choose another data set"
        )


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} must be numbers separated by commas, as in 0,1,2, got {text!r}") from None


for recipe_with_commands in registry.installed().values():
    if recipe_with_commands.has("commands"):
        recipe_with_commands.load("commands").register(app)
