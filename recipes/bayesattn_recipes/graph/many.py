"""Many seeds of one config trained as one network with as many copies; each copy is the run its seed gives alone.

Copies may also differ in settings that change no shape (dropout, noise, prior, weights of KL and L2) and in their splits and
labels: a grid of settings, or the ten splits of a data set, is one network, too. On a GPU nothing waits for the device
within an epoch: early stopping is a mask per copy, and the host looks at it only now and then.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bayesattn.evaluation.runs import CHECKPOINT_FILE, make_run_folder, write_log, write_run, write_tensors
from bayesattn.kl import record_kl
from bayesattn_recipes.graph.data import Graph
from bayesattn_recipes.graph.inputs import GraphInputs
from bayesattn_recipes.graph.layer import CopySettings
from bayesattn_recipes.graph.model import GraphAttentionNetwork, stack_networks, take_copies
from bayesattn_recipes.graph.sampling import neighbourhood_inputs
from bayesattn_recipes.graph.targets import Targets
from bayesattn_recipes.graph.train import RECIPE, GraphConfig, build_model, build_optimizer, training_inputs

# how often the host asks whether all copies have stopped
CHECK_EVERY = 20
# networks side by side: on a CPU more do not fit the cache
COPIES = {"cpu": 5, "cuda": 100}


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
    config: GraphConfig | Sequence[GraphConfig],
    graph: Graph,
    seeds: Sequence[int],
    device: torch.device | str = "cpu",
    *,
    shares_noise: bool = False,
) -> GraphAttentionNetwork:
    """Build the networks that `seed_everything(seed)` and `build_model` give for each seed, as copies of one.

    Each copy's generator goes on where building the network left torch's, so its noise is that of the run alone, too; unless
    all share one generator, which on a GPU draws for all of them in the time of one.
    """
    device, configs = torch.device(device), _for_each("config", config, len(seeds))
    stacked = build_model(configs[0], graph, num_copies=len(seeds))
    singles, generators = [], []
    with torch.random.fork_rng(devices=[]):
        for seed in seeds:
            torch.manual_seed(seed)
            singles.append(build_model(configs[0], graph))
            generator = torch.Generator(device).manual_seed(seed)
            if device.type == "cpu":
                generator.set_state(torch.get_rng_state())
            generators.append(generator)
    stack_networks(singles, stacked)
    stacked.set_generators(generators[:1] if shares_noise else generators)
    return stacked.to(device)


def train_many(
    config: GraphConfig | Sequence[GraphConfig],
    graph: Graph | Sequence[Graph],
    seeds: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    inputs: GraphInputs | None = None,
    shares_noise: bool = False,
    on_progress: Callable[[int, int], Any] = lambda done, total: None,
) -> ManyRuns:
    """Train one network per seed, all at once.

    Args:
        config: Of every run, or one for each; their own seeds are not used. They may differ in dropout, weight decay, the
            numbers of noise and prior, and the final weight of the KL.
        graph: Already loaded; or one for each copy, which may differ in splits and labels. Without a KL a step reads the
            neighbourhoods of all copies' training nodes, so a run's noise depends on the splits beside its own.
        seeds: One for each copy.
        device: Where to compute.
        inputs: Of the graph, where the caller has them already.
        shares_noise: Draw the noise of all copies from one generator: faster on a GPU, but then a run depends on which ones
            run beside it.
        on_progress: Called with the epochs done and to do.
    """
    if not seeds:
        raise ValueError("seeds is empty; allowed: at least one")
    model = build_many(config, _for_each("graph", graph, len(seeds))[0], seeds, device, shares_noise=shares_noise)
    return fit_many(model, config, graph, seeds, inputs=inputs, on_progress=on_progress)


Item = TypeVar("Item")


def _for_each(name: str, given: Item | Sequence[Item], count: int) -> list[Item]:
    """Return one item for each copy, where one or as many are given."""
    items = list(given) if isinstance(given, Sequence) else [given] * count
    if len(items) != count:
        raise ValueError(f"{name} has {len(items)} entries; allowed: {count}, one for each seed, or one for all")
    return items


def _shape_of(config: GraphConfig) -> GraphConfig:
    """Return what copies must have in common: the config without the numbers in which they may differ."""
    attention = dataclasses.replace(
        config.attention, weibull_k=1.0, gamma_alpha=1.0, gamma_beta=1.0, sigma_q=1.0, sigma_p=1.0, mu_p=0.0
    )
    schedule = dataclasses.replace(config.training.kl_schedule, final=1.0)
    training = dataclasses.replace(config.training, kl_schedule=schedule)
    return dataclasses.replace(
        config, attention=attention, training=training, dropout=0.0, weight_decay=0.0, seed=0, split=0
    )


def fit_many(
    model: GraphAttentionNetwork,
    config: GraphConfig | Sequence[GraphConfig],
    graph: Graph | Sequence[Graph],
    seeds: Sequence[int],
    *,
    inputs: GraphInputs | None = None,
    on_progress: Callable[[int, int], Any] = lambda done, total: None,
) -> ManyRuns:
    """Train the copies of `model`, with GAT's two criteria for each."""
    start = time.perf_counter()
    parameter = next(model.parameters())
    device, dtype, copies = parameter.device, parameter.dtype, len(seeds)
    configs, graphs = _for_each("config", config, copies), _for_each("graph", graph, copies)
    config, training = configs[0], configs[0].training
    if any(_shape_of(other) != _shape_of(config) for other in configs):
        raise ValueError("configs differ in more than dropout, weight decay, noise, prior and KL weight; allowed: in these")
    inputs = GraphInputs.of(graphs[0]) if inputs is None else inputs
    train, validation = (Targets.of(graphs, name, device) for name in ("train", "validation"))
    validation_inputs = neighbourhood_inputs(inputs, validation.nodes).to(device, dtype)
    inputs, rows = training_inputs(config, inputs, train.nodes)
    inputs, rows = inputs.to(device, dtype), rows.to(device)
    # the KL of a graph is shared by its labels
    weights = [own.training.kl_schedule.final / size for own, size in zip(configs, train.sizes.tolist())]
    model.set_settings([CopySettings(own.attention, own.dropout, weight) for own, weight in zip(configs, weights)])
    schedule = dataclasses.replace(training.kl_schedule, final=1.0)
    optimizer, decay = _build_optimizer(configs, model)
    patience = training.patience
    best_nll = torch.full((copies,), torch.inf, dtype=dtype, device=device)
    best_accuracy = torch.zeros(copies, dtype=dtype, device=device)
    waited = torch.zeros(copies, dtype=torch.int64, device=device)
    kept_epoch, num_epochs = torch.zeros_like(waited), torch.zeros_like(waited)
    kept = {name: value.detach().clone() for name, value in model.named_parameters()}
    history = []
    for epoch in range(training.epochs):
        model.train()
        with record_kl() as scope:
            nll = train.cross_entropies(model(inputs)[:, rows]).sum()
        # the total is a mean over the copies, the loss a sum
        loss = nll + copies * schedule(epoch) * scope.total()
        optimizer.zero_grad()
        loss.backward()
        decay()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            logits = model(validation_inputs)
            nll, accuracy = validation.cross_entropies(logits), validation.accuracies(logits)
            history.append((nll, accuracy))
            is_active = torch.ones_like(waited, dtype=torch.bool) if patience is None else waited < patience
            num_epochs += is_active
            improves, holds = nll <= best_nll, accuracy >= best_accuracy
            kept_now = improves if config.kept_by == "nll" else improves & holds
            is_kept = is_active & (kept_now if training.keep != "last" else is_active)
            best_nll, best_accuracy = torch.minimum(nll, best_nll), torch.maximum(accuracy, best_accuracy)
            # a copy that has stopped stays stopped
            waited = torch.where(is_active & (improves | holds), 0, waited + 1)
            kept_epoch = torch.where(is_kept, epoch, kept_epoch)
            for name, value in model.named_parameters():
                groups = kept[name].unflatten(0, (copies, -1))
                mask = is_kept.view(-1, *[1] * (groups.ndim - 1))
                kept[name] = torch.where(mask, value.unflatten(0, (copies, -1)), groups).flatten(0, 1)
        on_progress(epoch + 1, training.epochs)
        if patience is not None and (epoch + 1) % CHECK_EVERY == 0 and not bool((waited < patience).any()):
            break
    model.load_state_dict(kept)
    nll_history, accuracy_history = (torch.stack(parts).cpu() for parts in zip(*history))
    seconds = time.perf_counter() - start
    return ManyRuns(model.eval(), list(seeds), kept_epoch.cpu(), num_epochs.cpu(), nll_history, accuracy_history, seconds)


def _build_optimizer(
    configs: Sequence[GraphConfig], model: GraphAttentionNetwork
) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """Return Adam, and what adds the L2 penalty's gradient where every copy has a penalty of its own."""
    penalties = [config.weight_decay for config in configs]
    if len(set(penalties)) == 1:
        return build_optimizer(configs[0], model), lambda: None
    parameter = next(model.parameters())
    by_copy = torch.tensor(penalties, device=parameter.device, dtype=parameter.dtype)

    def decay() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                groups = parameter.detach().unflatten(0, (len(penalties), -1))
                parameter.grad.add_((by_copy.view(-1, *[1] * (groups.ndim - 1)) * groups).flatten(0, 1))

    return build_optimizer(dataclasses.replace(configs[0], weight_decay=0.0), model), decay


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
