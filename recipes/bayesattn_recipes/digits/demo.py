"""The demo: doubt of ordinary models, then soft and Bayesian attention side by side, same data and budget, several seeds."""

from pathlib import Path

from rich.console import Console

from bayesattn.evaluation.runs import PREDICTIONS_FILE
from bayesattn.evaluation.threads import one_thread
from bayesattn_recipes.common import demo
from bayesattn_recipes.digits.data import OUT_OF_DISTRIBUTION, SHIFTS
from bayesattn_recipes.digits.doubt import show_doubt

CONFIG_NAMES = ("soft", "wc")
NOISE = (0.5, 1.0)
SHIFTED = (*(f"noise-{strength:g}" for strength in NOISE), *SHIFTS)
SCRAMBLED = (OUT_OF_DISTRIBUTION,)
TOLD_APART = {"ood_auroc_entropy": "AUROC entropy ↑", "ood_auroc_mutual_information": "AUROC mutual inf. ↑"}
# by title
TABLES = {
    "Clean test images": demo.columns("test ", ["test"], demo.QUALITY),
    f"Shifted test images, mean over {', '.join(SHIFTED)}": demo.columns("shifted ", SHIFTED, demo.QUALITY),
    "Scrambled images against clean ones, told apart by the uncertainty": demo.columns("ood ", SCRAMBLED, TOLD_APART),
}


def run_demo(
    out: Path, *, num_seeds: int = 3, num_samples: int = 20, epochs: int | None = None, console: Console
) -> list[Path]:
    """Train, evaluate and print the comparison; return the run folders for the demo's report.

    Args:
        out: Folder for the run folders and the figure of doubt; runs of an earlier demo in it are replaced.
        num_seeds: Runs per variant.
        num_samples: Draws per prediction.
        epochs: Overrides the configs' number of epochs, for a quick look.
        console: Where to print.
    """
    work = demo.plan("digits", CONFIG_NAMES, out, num_seeds=num_seeds, num_samples=num_samples, epochs=epochs, noise=NOISE)
    folders = [folder for _, _, folder, *_ in work.values()]
    # models with ordinary attention come first, because most people have those; the others go on training meanwhile
    ordinary = dict(zip([*work][:num_seeds], folders, strict=False))
    missing = set(ordinary)

    def show_once_trained(name: str) -> None:
        missing.discard(name)
        # a failed run has written no predictions; its error is raised at the end
        if name in ordinary and not missing and all((folder / PREDICTIONS_FILE).is_file() for folder in ordinary.values()):
            with one_thread():
                show_doubt([*ordinary.values()], out / "figures", num_samples, console)

    demo.run_side_by_side(demo.train_and_predict, work, console, on_end=show_once_trained)
    summaries = demo.summarize(folders, {key: column for table in TABLES.values() for key, column in table.items()}, out)
    for title, chosen in TABLES.items():
        demo.print_table(title, chosen, summaries, console)
    console.print(
        f"{demo.mean_over(num_seeds)}, {num_samples} draws. PAvPU: paired t-test on probabilities, threshold 0.05.",
        highlight=False,
    )
    return folders
