"""Our Trainer, and the stock one with the callback, on two processes: the step of one process over the same examples."""

import os
import socket

import pytest
import torch
import transformers as hf
from test_hf_trainer import arguments, by_hand, dataset, model, steps_taken

import bayesattn as ba
from bayesattn.integrations.hf import BayesianTrainer, KLCallback
from processes import leave, run_on_two


def _process(rank: int, port: int, folder: str, name: str, average: bool, stock: bool) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
    args, schedule = arguments(folder, **options, average_tokens_across_devices=average), ba.KLSchedule(final=0.3)
    if stock:
        trainer = hf.Trainer(
            model(name), args, train_dataset=dataset(name), callbacks=[KLCallback(schedule, max_share=None)]
        )
    else:
        trainer = BayesianTrainer(model(name), args, train_dataset=dataset(name), schedule=schedule, max_share=None)
    steps = steps_taken(trainer)
    if rank == 0:
        logs = [row for row in trainer.state.log_history if "kl" in row]
        torch.save((steps, logs), f"{folder}/steps.pt")
    leave()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "average", "stock"),
    [("bert", True, False), ("bert", False, False), ("llama", True, False), ("bert", False, True), ("llama", True, True)],
)
def test_kl_has_the_same_weight_on_two_processes(name, average, stock, tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    run_on_two(_process, port, str(tmp_path), name, average, stock)
    actual, logs = torch.load(tmp_path / "steps.pt")
    for key, gradient in by_hand(name, 0.3, 0.0).items():
        if gradient is not None:
            torch.testing.assert_close(actual[key], gradient, rtol=2e-3, atol=2e-5, msg=lambda m, key=key: f"{key}: {m}")
    # the log is the mean over both processes; their micro-batches are equally large where every example has one label
    assert logs[0]["kl"] > 0
    if name == "bert":
        assert logs[0]["loss"] == pytest.approx(logs[0]["nll"] + 0.3 * logs[0]["kl"], rel=1e-3)
