"""The demo's last part: soft and Bayesian graph attention on a generated graph, several seeds each."""

from pathlib import Path

from rich.console import Console

from bayesattn_recipes.common import demo
from bayesattn_recipes.graph.config import load_config_graph
from bayesattn_recipes.graph.train import load_config

CONFIG_NAMES = ("generated-soft", "generated-wc")
COLUMNS = demo.columns("", ["test"], {**demo.QUALITY, "aurc": "AURC ↓"})


def run_demo(
    out: Path, *, num_seeds: int = 3, num_samples: int = 20, epochs: int | None = None, console: Console
) -> list[Path]:
    """Train, evaluate and print the comparison; return the run folders for the demo's report.

    Args:
        out: Folder for the run folders; runs of an earlier demo in it are replaced.
        num_seeds: Runs per variant.
        num_samples: Draws per prediction.
        epochs: Overrides the configs' number of epochs, for a quick look.
        console: Where to print.
    """
    work = demo.plan("graph", CONFIG_NAMES, out, num_seeds=num_seeds, num_samples=num_samples, epochs=epochs, num_methods=2)
    demo.run_side_by_side(demo.train_and_predict, work, console)
    folders = [folder for _, _, folder, *_ in work.values()]
    summaries, graph = demo.summarize(folders, COLUMNS, out), load_config_graph(load_config(CONFIG_NAMES[0]), None)
    title = f"A generated graph: {graph.num_nodes} nodes, {len(graph.splits['train'])} with a label"
    demo.print_table(title, COLUMNS, summaries, console, first="attention", space=0)
    console.print(f"{demo.mean_over(num_seeds)}, {num_samples} draws; test nodes.", highlight=False)
    return folders
