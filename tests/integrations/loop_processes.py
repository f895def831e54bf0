"""Train the tiny experiment on several processes and write what came out; started by `test_loop_processes.py`.

One interpreter imports everything and forks the processes, which costs seconds instead of the minutes that fresh
interpreters would. It never computes a gradient itself, so there is nothing a fork could break.
"""

import faulthandler
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, DistributedType
from accelerate.utils import FullyShardedDataParallelPlugin
from loop_experiment import TinyConfig, TinyExperiment, training

from bayesattn import AttentionConfig, KLSchedule
from bayesattn_recipes.common import runs
from bayesattn_recipes.common.checkpoints import Checkpoints
from bayesattn_recipes.common.config import seed_everything
from bayesattn_recipes.common.loop import train
from bayesattn_recipes.common.state import whole

# float64, where order of summation changes the 16th digit only; dropout draws by process, so none here
COMMON = {"keep": "last", "noise": "keyed", "clip_norm": 0.7}
CASES = {
    "plain": training(**COMMON),
    "accumulated": training(**COMMON, accumulation_steps=3),
    # the last step of an epoch has two examples: of four processes, two have none
    "empty shares": training(**COMMON, batch_size=21),
    "strong KL": training(**{**COMMON, "kl_schedule": KLSchedule("constant", final=50.0)}),
    "by process": training(**{**COMMON, "noise": "generator"}),
}


def fit(name: str, out: Path) -> None:
    config = TinyConfig(CASES[name], AttentionConfig("BAM-WC", weibull_k=2.0), dropout=0.0)
    seed_everything(config.seed)
    experiment = TinyExperiment(config, is_random=False)
    experiment.model.double()
    experiment.inputs = experiment.inputs.double()
    # plain SGD: Adam divides by the gradient's size and would make much of the last digit
    experiment.optimizer = torch.optim.SGD(experiment.model.parameters(), lr=0.05, momentum=0.5)
    experiment.scheduler = None
    log = train(experiment, config.training, seed=config.seed)
    save(
        out, {"rows": log.rows, "parameters": {name: whole(value) for name, value in experiment.model.state_dict().items()}}
    )


def save(out: Path, value: dict) -> None:
    if PartialState().process_index == 0:
        torch.save(value, out)


def run_on(world: int, function: Callable[[], None], deadline: float = 120.0) -> None:
    """Fork `world` processes that know each other, and wait for them."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            faulthandler.dump_traceback_later(deadline, exit=True)
            os.environ.update(
                ACCELERATE_USE_CPU="true", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
                LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
            )  # fmt: skip
            try:
                function()
            except BaseException:
                faulthandler.cancel_dump_traceback_later()
                import traceback

                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            if world > 1:
                dist.barrier()
            # each process alone would pass most tests
            os._exit(0 if PartialState().num_processes == world else 1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * world, f"{world} processes ended with {codes}"


def sharded() -> None:
    """Switch Accelerate to FSDP2. It offers that on accelerators only, so on a CPU its state is set by hand."""
    Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP", cpu_ram_efficient_loading=False)
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)


class Stopped(Exception):
    pass


def interrupted(out: Path, stop_at: int, *, is_sharded: bool = False) -> None:
    """A run with dropout and all generators, ended after `stop_at` steps; 0 lets it finish. Goes on where one is."""
    if is_sharded:
        sharded()
    config = TinyConfig(training(checkpoint_steps=1, noise="keyed"))

    def on_progress(done: int, total: int) -> None:
        if done == stop_at:
            dist.barrier() if dist.is_initialized() else None
            raise Stopped

    try:
        runs.train_run("tiny", config, lambda: TinyExperiment(config), out, on_progress, resume=True)
    except Stopped:
        assert Checkpoints(out, {}).paths()


def main(out: Path) -> None:
    torch.set_num_threads(1)
    # accumulated steps are compared with plain ones, and two processes leave no share empty
    worlds = {"plain": (1, 2, 4), "accumulated": (2,), "empty shares": (1, 4)}
    for name in CASES:
        for world in worlds.get(name, (1, 2)):
            run_on(world, lambda name=name, world=world: fit(name, out / f"{name}-{world}.pt"))
    run_on(2, lambda: (sharded(), fit("plain", out / "plain-fsdp.pt")))
    run_on(2, lambda: (sharded(), fit("accumulated", out / "accumulated-fsdp.pt")))
    for label, is_sharded in (("ddp", False), ("fsdp", True)):
        run_on(2, lambda s=is_sharded, name=label: interrupted(out / f"whole-{name}", 0, is_sharded=s))
        for stop_at in (6, 0):
            run_on(2, lambda s=is_sharded, name=label, at=stop_at: interrupted(out / f"ended-{name}", at, is_sharded=s))
    # begun by two processes, finished by one
    run_on(2, lambda: interrupted(out / "fewer", 6))
    run_on(1, lambda: interrupted(out / "fewer", 0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
