"""Runs of the language recipe that several files of tests look at; trained once, through the command line."""

import pytest
from language_files import write_sentiment

from bayesattn.cli import main

TINY = ["encoder=tiny", "training.steps=200", "training.learning_rate=2e-3", "max_length=24", "training.batch_size=16"]


def call(*arguments):
    with pytest.raises(SystemExit) as exited:
        main([str(argument) for argument in arguments])
    return exited.value.code


@pytest.fixture(scope="session")
def sentiment(tmp_path_factory):
    """A folder with train.tsv and dev.tsv."""
    return write_sentiment(tmp_path_factory.mktemp("sentiment"))


def train(folder, sentiment, *settings):
    options = [f"--set={setting}" for setting in (*TINY, *settings)]
    assert call("train", "language", "--config", "own", "--data", sentiment, "--out", folder, *options) == 0
    return folder


@pytest.fixture(scope="session")
def bayesian_run(tmp_path_factory, sentiment):
    """200 steps of a tiny BAM-WC."""
    return train(tmp_path_factory.mktemp("runs") / "wc", sentiment)


@pytest.fixture(scope="session")
def soft_run(tmp_path_factory, sentiment):
    """200 steps of a tiny soft model, with dropout."""
    return train(tmp_path_factory.mktemp("runs") / "soft", sentiment, "attention.variant=soft")
