"""From a config to a run folder and back, the same for every recipe."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from accelerate import Accelerator
from torch import nn

from bayesattn.cli.progress import is_first_process
from bayesattn.config import AttentionConfig
from bayesattn.evaluation.runs import RUN_FILE, read_run, write_run
from bayesattn.evaluation.threads import one_thread
from bayesattn.files import JSON_LIMIT, RunError, read_tensors, read_text, write_tensors
from bayesattn.scalars import check_count
from bayesattn_recipes.common.checkpoints import Checkpoints, check_identity, leaves
from bayesattn_recipes.common.config import MetricLog, build_config, read_config, seed_everything
from bayesattn_recipes.common.folders import (
    CHECKPOINT_FILE,
    LOG_FILE,
    check_run_folder,
    hold_run_folder,
    make_run_folder,
    write_log,
)
from bayesattn_recipes.common.loop import Experiment, TrainingConfig, num_steps, train
from bayesattn_recipes.common.state import whole
from bayesattn_recipes.common.tensorboard import TensorBoardLog


@runtime_checkable
class RunConfig(Protocol):
    """The fields that every recipe's config has; recipes add their own. Always a frozen dataclass."""

    @property
    def attention(self) -> AttentionConfig:
        """Soft or Bayesian attention."""
        ...

    @property
    def training(self) -> TrainingConfig:
        """How long and how fast."""
        ...

    @property
    def seed(self) -> int:
        """Seed of initialization, batch order, dropout and noise."""
        ...


Config = TypeVar("Config", bound=RunConfig)
# parts of torch's errors about too little CPU memory
_TOO_LARGE = ("can't allocate memory", "Storage size calculation overflowed")


def train_run(
    recipe: str,
    config: RunConfig,
    build: Callable[[], Experiment],
    out: Path,
    on_progress: Callable[[int, int], Any] = lambda done, total: None,
    *,
    overwrite: bool = False,
    resume: bool = False,
    tensorboard: bool = False,
) -> MetricLog:
    """Train and write a run folder: parameters, log, and last of all `run.json`, whose presence means "complete".

    Args:
        recipe: Its name.
        config: The run.
        build: Makes the experiment, after everything has been seeded; if it raises, no folder is left behind.
        out: The folder.
        on_progress: Called with the optimizer steps done and to do.
        overwrite: Replace a run that is in the folder.
        resume: Continue the unfinished run in the folder, with the same result as without the interruption.
            Without a checkpoint in the folder the run starts from the beginning; a complete one is left as it is.
        tensorboard: Also write the log as TensorBoard events.
    """
    if resume and overwrite:
        raise ValueError("resume and overwrite are both True. Use one of them")
    identity: dict[str, Any] = {"recipe": recipe, "config": dataclasses.asdict(config)}  # type: ignore[call-overload]
    if resume and (out / RUN_FILE).exists():
        return _read_complete(out, identity)
    if not resume:
        check_run_folder(out, overwrite=overwrite)
    events = TensorBoardLog(out) if tensorboard else None
    seed_everything(config.seed)
    experiment = _build(build, identity)
    size = {"num_examples": experiment.num_examples, "num_steps": num_steps(experiment, config.training)}
    # not PartialState, which on a CPU does not detect other processes, and keeps Accelerator from detecting them
    processes = Accelerator(mixed_precision="no")
    with hold_run_folder(out) if processes.is_main_process else nullcontext():
        if processes.is_main_process and not resume:
            make_run_folder(out, overwrite=overwrite)
        processes.wait_for_everyone()
        if resume and (out / RUN_FILE).exists():
            # another process finished it while this one read its data
            return _read_complete(out, identity)
        checkpoints = Checkpoints(out, identity | size)
        on_row = events.add if events is not None and processes.is_main_process else lambda row: None
        log = train(
            experiment, config.training, seed=config.seed, on_progress=on_progress, on_row=on_row, checkpoints=checkpoints
        )
        parameters = {name: whole(value) for name, value in experiment.model.state_dict().items()}
        if processes.is_main_process:
            write_tensors(out / CHECKPOINT_FILE, parameters)
            write_log(out, log.rows)
            experiment.write_files(out)
            write_record(out, recipe, config, experiment.model, log, **experiment.facts())
            checkpoints.clear()
        if events is not None:
            events.close()
        processes.wait_for_everyone()
        return log


def _build(build: Callable[[], Experiment], identity: dict[str, Any]) -> Experiment:
    """Make the experiment; raise a specific error if its config needs more memory than there is."""
    try:
        return build()
    except RuntimeError as error:
        # torch has a class for this error only on a GPU
        if not isinstance(error, torch.OutOfMemoryError) and not any(words in str(error) for words in _TOO_LARGE):
            raise
        sizes = {name: value for name, value in leaves(identity) if type(value) is int and not name.endswith("seed")}
        largest = max(sizes, key=lambda name: sizes[name])
        raise ValueError(
            "the model of this config does not fit into memory. Reduce its sizes; the largest is "
            f"{largest.removeprefix('config.')} = {sizes[largest]}"
        ) from None


def _read_complete(out: Path, identity: dict[str, Any]) -> MetricLog:
    """Return the log of a complete run that is to be resumed, if it is the same run."""
    found = read_run(out)
    check_identity(out, {name: found[name] for name in identity}, identity)
    log = read_log(out)
    if is_first_process():
        # the process may have died between the run's last file and this
        Checkpoints(out, identity).clear()
    return log


def write_record(out: Path, recipe: str, config: RunConfig, model: nn.Module, log: MetricLog, **facts: Any) -> None:
    """Write `run.json` of a trained model; `facts` are further entries."""
    write_run(
        out,
        recipe=recipe,
        variant=config.attention.variant,
        config=dataclasses.asdict(config),  # type: ignore[call-overload]
        seed=config.seed,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        train_seconds=round(log.seconds, 3),
        **facts,
    )


@dataclasses.dataclass(frozen=True)
class Training(Generic[Config]):
    """How a recipe trains; its module `train` exports `load_config`, `train_run` and perhaps `fit`.

    Attributes:
        recipe: Its name.
        config: Class of its configs.
        configs: The folder of their YAML files.
        build: Makes the experiment from a config and its data: the folder of the data sets, or what was read from it.
        is_small: Whether a run's tensors are so small that one thread computes fastest.
    """

    recipe: str
    config: type[Config]
    configs: Path
    build: Callable[[Config, Any], Experiment]
    is_small: Callable[[Config], bool] = lambda config: False

    def load_config(self, name: str, settings: Sequence[str] = ()) -> Config:
        """Read a config by its name or path, with `name=value` settings on top."""
        return read_config(self.config, name, self.configs, settings)

    def load_run_config(self, folder: Path) -> Config:
        """Read the config of a run of this recipe."""
        run = read_run(folder)
        if run["recipe"] != self.recipe:
            raise RunError(f"{folder} must be a run of recipe {self.recipe!r}, got one of {run['recipe']!r}")
        return build_config(self.config, run["config"], str(folder / RUN_FILE))

    def fit(
        self, config: Config, data: Any = None, on_progress: Callable[[int, int], Any] = lambda done, total: None
    ) -> tuple[Any, MetricLog]:
        """Train a model and return it with its log, without a run folder; arguments as for `train_run`."""
        with self._threads(config):
            seed_everything(config.seed)
            experiment = self.build(config, data)
            log = train(experiment, config.training, seed=config.seed, on_progress=on_progress)
            return experiment.model, log

    def train_run(
        self,
        config: Config,
        out: Path,
        on_progress: Callable[[int, int], Any] = lambda done, total: None,
        *,
        data: Any = None,
        **options: bool,
    ) -> MetricLog:
        """Train and write a run folder; `data` as for `build`, options as for the function `train_run`."""
        with self._threads(config):
            return train_run(self.recipe, config, lambda: self.build(config, data), out, on_progress, **options)

    def _threads(self, config: Config) -> AbstractContextManager[None]:
        return one_thread() if self.is_small(config) else nullcontext()


def load_parameters(folder: Path, model: nn.Module) -> None:
    """Load the parameters of a run into the model that its config describes, and put it into eval mode."""
    tensors, _ = read_tensors(folder / CHECKPOINT_FILE)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder / CHECKPOINT_FILE} does not fit the config of its run: {reason}") from None
    model.eval()


def read_log(folder: Path) -> MetricLog:
    """Read the log of a run."""
    text = read_text(folder / LOG_FILE, JSON_LIMIT)
    try:
        rows = [json.loads(line) for line in text.splitlines()]
    except (ValueError, RecursionError) as error:
        raise RunError(f"{folder / LOG_FILE} cannot be read as JSON lines: {error}") from None
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise RunError(f"{folder / LOG_FILE} must hold one JSON object per line, at least one")
    return MetricLog(rows)


def choose_methods(given: Sequence[str] | None, allowed: Sequence[str], num_samples: int, variant: str) -> list[str]:
    """Return the methods by which predictions of a run are drawn; None takes the first two.

    Args:
        given: The requested methods.
        allowed: Methods of the model, the usual ones first.
        num_samples: Draws, at least 2.
        variant: Variant of the model, for the message.
    """
    for method in given or ():
        if method not in allowed:
            raise ValueError(f"method must be one of {', '.join(allowed)} for {variant}, got {method!r}")
    check_count("num_samples", num_samples, least=2)
    return list(allowed[:2]) if given is None else list(dict.fromkeys(given))
