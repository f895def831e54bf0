"""Many seeds of one config trained as one network with as many copies; each copy is the run its seed gives alone.

On a GPU nothing waits for the device within an epoch: early stopping is a mask per copy, and the host looks at it only
now and then.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from bayesattn.recipes.graph.data import Graph
from bayesattn.recipes.graph.model import GraphAttentionNetwork, GraphInputs, stack_networks, take_copies
from bayesattn.recipes.graph.sampling import neighbourhood_inputs
from bayesattn.recipes.graph.train import RECIPE, GraphConfig, build_model, build_optimizer, training_inputs
from bayesattn.recording import record_kl
from bayesattn.runs import CHECKPOINT_FILE, make_run_folder, write_log, write_run, write_tensors

# how often the host asks whether all copies have stopped
CHECK_EVERY = 20


@dataclass(frozen=True)
class ManyRuns:
    """Trained networks side by side.

    Attributes:
        model: With the parameters that every copy keeps, in eval mode.
        seeds: Of the copies.
        kept_epoch: Epoch whose parameters each copy keeps.
        num_epochs: Epochs each copy trained before it stopped.
        validation_nll: Of every epoch and copy.
        validation_accuracy: Of every epoch and copy.
        seconds: All of them took together.
    """

    model: GraphAttentionNetwork
    seeds: list[int]
    kept_epoch: Int[Tensor, " copies"]
    num_epochs: Int[Tensor, " copies"]
    validation_nll: Float[Tensor, "epochs copies"]
    validation_accuracy: Float[Tensor, "epochs copies"]
    seconds: float


def build_many(
    config: GraphConfig, graph: Graph, seeds: Sequence[int], device: torch.device | str = "cpu"
) -> GraphAttentionNetwork:
    """Build the networks that `seed_everything(seed)` and `build_model` give for each seed, as copies of one.

    Each copy's generator goes on where building the network left torch's, so its noise is that of the run alone, too.
    """
    device = torch.device(device)
    stacked = build_model(config, graph, num_copies=len(seeds))
    singles, generators = [], []
    with torch.random.fork_rng(devices=[]):
        for seed in seeds:
            torch.manual_seed(seed)
            singles.append(build_model(config, graph))
            generator = torch.Generator(device).manual_seed(seed)
            if device.type == "cpu":
                generator.set_state(torch.get_rng_state())
            generators.append(generator)
    stack_networks(singles, stacked)
    stacked.set_generators(generators)
    return stacked.to(device)


def train_many(
    config: GraphConfig,
    graph: Graph,
    seeds: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    inputs: GraphInputs | None = None,
    on_progress: Callable[[int, int], Any] = lambda done, total: None,
) -> ManyRuns:
    """Train one network per seed, all at once.

    Args:
        config: Of every run; its own seed is not used.
        graph: Already loaded.
        seeds: One for each copy.
        device: Where to compute.
        inputs: Of the graph, where the caller has them already.
        on_progress: Called with the epochs done and to do.
    """
    if not seeds:
        raise ValueError("seeds is empty; allowed: at least one")
    model = build_many(config, graph, seeds, device)
    return fit_many(model, config, graph, seeds, inputs=inputs, on_progress=on_progress)


def fit_many(
    model: GraphAttentionNetwork,
    config: GraphConfig,
    graph: Graph,
    seeds: Sequence[int],
    *,
    inputs: GraphInputs | None = None,
    on_progress: Callable[[int, int], Any] = lambda done, total: None,
) -> ManyRuns:
    """Train the copies of `model`, with GAT's two criteria for each."""
    start = time.perf_counter()
    parameter = next(model.parameters())
    device, dtype, copies = parameter.device, parameter.dtype, len(seeds)
    inputs = GraphInputs.of(graph) if inputs is None else inputs
    validation_inputs = neighbourhood_inputs(inputs, graph.splits["validation"]).to(device, dtype)
    inputs, rows = training_inputs(config, graph, inputs)
    inputs, rows = inputs.to(device, dtype), rows.to(device)
    train_labels, validation_labels = (graph.labels[graph.splits[name]].to(device) for name in ("train", "validation"))
    optimizer = build_optimizer(config, model)
    patience = config.training.patience
    best_nll = torch.full((copies,), torch.inf, dtype=dtype, device=device)
    best_accuracy = torch.zeros(copies, dtype=dtype, device=device)
    waited = torch.zeros(copies, dtype=torch.int64, device=device)
    kept_epoch, num_epochs = torch.zeros_like(waited), torch.zeros_like(waited)
    kept = {name: value.detach().clone() for name, value in model.named_parameters()}
    history = []
    for epoch in range(config.training.epochs):
        model.train()
        with record_kl() as scope:
            nll = cross_entropies(model(inputs)[:, rows], train_labels).sum()
        loss = nll
        if len(scope):
            # the KL of a graph is shared by its labels; the total is a mean over the copies, the loss a sum
            loss = nll + copies * config.training.kl_schedule(epoch) / len(train_labels) * scope.total()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            logits = model(validation_inputs)
            nll = cross_entropies(logits, validation_labels)
            accuracy = (logits.argmax(dim=-1) == validation_labels).to(dtype).mean(dim=1)
            history.append((nll, accuracy))
            is_active = torch.ones_like(waited, dtype=torch.bool) if patience is None else waited < patience
            num_epochs += is_active
            improves, holds = nll <= best_nll, accuracy >= best_accuracy
            is_kept = is_active & ((improves & holds) if config.training.keep != "last" else is_active)
            best_nll, best_accuracy = torch.minimum(nll, best_nll), torch.maximum(accuracy, best_accuracy)
            # a copy that has stopped stays stopped
            waited = torch.where(is_active & (improves | holds), 0, waited + 1)
            kept_epoch = torch.where(is_kept, epoch, kept_epoch)
            for name, value in model.named_parameters():
                groups = kept[name].unflatten(0, (copies, -1))
                mask = is_kept.view(-1, *[1] * (groups.ndim - 1))
                kept[name] = torch.where(mask, value.unflatten(0, (copies, -1)), groups).flatten(0, 1)
        on_progress(epoch + 1, config.training.epochs)
        if patience is not None and (epoch + 1) % CHECK_EVERY == 0 and not bool((waited < patience).any()):
            break
    model.load_state_dict(kept)
    nll_history, accuracy_history = (torch.stack(parts).cpu() for parts in zip(*history))
    seconds = time.perf_counter() - start
    return ManyRuns(model.eval(), list(seeds), kept_epoch.cpu(), num_epochs.cpu(), nll_history, accuracy_history, seconds)


def write_runs(runs: ManyRuns, config: GraphConfig, folders: Sequence[Path], *, overwrite: bool = False) -> None:
    """Write one run folder per copy, as if each had been trained alone.

    Args:
        runs: Trained networks.
        config: They were trained with; each folder gets it with its own seed.
        folders: One for each copy.
        overwrite: Replace runs that are in the folders.
    """
    if len(folders) != len(runs.seeds):
        raise ValueError(f"folders has {len(folders)} entries; allowed: {len(runs.seeds)}, one for each seed")
    state = runs.model.state_dict()
    for copy, (seed, folder) in enumerate(zip(runs.seeds, folders)):
        make_run_folder(folder, overwrite=overwrite)
        own = take_copies(state, torch.tensor([copy]), len(runs.seeds))
        write_tensors(folder / CHECKPOINT_FILE, own)
        nll, accuracy = runs.validation_nll[:, copy].tolist(), runs.validation_accuracy[:, copy].tolist()
        epochs = range(int(runs.num_epochs[copy]))
        write_log(folder, [{"epoch": i, "validation_nll": nll[i], "validation_accuracy": accuracy[i]} for i in epochs])
        write_run(
            folder,
            recipe=RECIPE,
            variant=config.attention.variant,
            config=dataclasses.asdict(dataclasses.replace(config, seed=seed)),
            seed=seed,
            num_parameters=sum(value.numel() for value in own.values()),
            train_seconds=round(runs.seconds / len(runs.seeds), 3),
        )


def cross_entropies(logits: Float[Tensor, "copies k c"], labels: Int[Tensor, " k"]) -> Float[Tensor, " copies"]:
    """Return the mean cross-entropy of each copy."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.repeat(logits.shape[0]), reduction="none")
    return losses.view(logits.shape[:2]).mean(dim=1)
