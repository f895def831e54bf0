"""Files from strangers and mistakes of users end in one printable line and exit code 2, without a traceback or a hang."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bayesattn import files
from bayesattn.cli import LINE_LIMIT, main
from bayesattn.evaluation import runs
from bayesattn_recipes.common.config import build_config, load_yaml, override, parse_yaml, shown
from bayesattn_recipes.digits.config import DigitsConfig

TINY = [
    f"--set={name}" for name in ("training.epochs=1", "train_size=20", "training.batch_size=20", "width=4", "num_heads=2")
]


def call(*arguments):
    with pytest.raises(SystemExit) as exited:
        main([str(argument) for argument in arguments])
    return exited.value.code


def assert_refused(capsys, *arguments, message=""):
    capsys.readouterr()
    assert call(*arguments) == 2
    streams = capsys.readouterr()
    assert streams.err.count("\n") == 1
    assert streams.err.startswith("bayesattn: ")
    assert "Traceback" not in streams.err
    assert message in streams.err
    assert len(streams.err) < LINE_LIMIT + 100
    assert all(letter.isprintable() for letter in streams.err[:-1])


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi")
)
NONSENSE = "".join(f"nonsense_{line}: [{line}, {{deep: {line}}}]\n" for line in range(1000))
CONFIGS = {
    "a thousand lines of nonsense": (NONSENSE, "nonsense_0 is unknown. Use one of attention"),
    "a bomb of aliases": (BOMB, "aliases (*name) are not allowed"),
    "one alias": ("seed: &a 1\nwidth: *a\n", "aliases (*name) are not allowed"),
    "code": ("seed: !!python/object/apply:os.system ['true']\n", "cannot be read"),
    "a tag that does not fit": ("seed: !!timestamp soon\n", "a value does not match its tag"),
    "deep nesting": ("seed: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
    "a key twice": ("seed: 1\nseed: 2\n", "the key 'seed' occurs twice"),
    "too large": ("seed: 1\n" + "# nothing\n" * 10_000, "is larger than 65536 bytes"),
    "nothing": ("", "must hold a mapping of names to values, got NoneType"),
    "a list": ("- seed\n", "must hold a mapping of names to values, got list"),
    "control characters": ('"\\e[31m\\nred\\u202e": 1\n', "is unknown. Use one of"),
    "a very long name": (f"{'n' * 1000}: 1\n", "config.yaml: 'nnn"),
    "a very long value": (f"seed: {'v' * 30_000}\n", "seed must be an integer, got 'vvv"),
    "an endless number": (f"seed: {'9' * 20_000}\n", "cannot be read"),
    "a huge number": (
        "training: {epochs: 99999999999999999999}\n",
        "training.epochs must be a 64-bit number, text, true, false, null, or a list, got 99999999999999999999",
    ),
    "not a number": ("learning_rate: .nan\n", "learning_rate must be a finite number, got nan"),
    "a truth for a number": ("training: {epochs: true}\n", "training.epochs must be an integer, got True"),
    "unicode": ("ünïcödé 💥: 1\n", "is unknown. Use one of"),
    "bytes": (b"\xff\xfe\x00", "cannot be read"),
    "a seed out of range": ("seed: -1\n", "seed must be at least 0, got -1"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_broken_config_is_refused(tmp_path, capsys, name):
    content, message = CONFIGS[name]
    path = tmp_path / "config.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    start = time.process_time()
    assert_refused(capsys, "train", "digits", "--config", path, "--out", tmp_path / "out", message=message)
    # the slowest takes a fifth of a second
    assert time.process_time() - start < 5.0
    assert not (tmp_path / "out").exists()


def test_places_that_are_no_config_are_refused(tmp_path, capsys):
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    for config, message in (
        (tmp_path / "folder.yaml", "must be a file, got a folder"),
        (tmp_path / "pipe.yaml", "must be a file, got a device, pipe or socket"),
        (tmp_path / "missing.yaml", "config must be one of lc, lf, nokl, soft, wc, wf, or"),
        ("x" * 5000 + ".yaml", "File name too long"),
        ("../digits/configs/wc", "config must be one of lc, lf, nokl, soft, wc, wf, or"),
        ("nul\0.yaml", "config must be one of lc, lf"),
    ):
        assert_refused(capsys, "train", "digits", "--config", config, "--out", tmp_path / "out", message=message)


def test_places_that_cannot_hold_a_run_are_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    for out, message in (
        (tmp_path / "file", "is a file. Give a new or empty folder"),
        (tmp_path / "file" / "below", "Not a directory"),
        (tmp_path / ("n" * 300), "File name too long"),
    ):
        assert_refused(capsys, "train", "digits", "--config", "wc", "--out", out, *TINY, message=message)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_folder_with_any_name_works(tmp_path, capsys):
    folder = tmp_path / "ünïcödé 💥 [red] \u202e"
    assert call("train", "digits", "--config", "soft", "--out", folder, *TINY) == 0
    assert (folder / "run.json").exists()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "run"
    assert call("train", "digits", "--config", "soft", "--out", folder, *TINY) == 0
    return folder


def _header(text):
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("checkpoint.safetensors", b""),
        ("checkpoint.safetensors", b"\xff" * 8),
        ("checkpoint.safetensors", _header(b'{"a":{"dtype":"F32","shape":[9999999999],"data_offsets":[0,39999999996]}}')),
        ("checkpoint.safetensors", _header(b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}') + b"\0"),
        ("checkpoint.safetensors", None),
        ("run.json", b""),
        ("run.json", b'{"schema": "bayesattn.run/1"}'),
        ("run.json", b"[" * 100_000),
        ("run.json", b'{"schema": ' + b"9" * 5000 + b"}"),
        ("run.json", None),
    ],
)
def test_a_broken_file_of_a_run_is_refused(run, tmp_path, capsys, name, content):
    broken = tmp_path / "run"
    broken.mkdir()
    for path in run.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    (broken / name).unlink()
    if content is None:
        (broken / name).mkdir()
    else:
        (broken / name).write_bytes(content)
    assert_refused(capsys, "evaluate", broken, "--samples", 2)


def test_a_pickle_is_never_opened(run, tmp_path, capsys):
    """A file that torch.load would run code from is refused as the wrong kind of file."""
    broken = tmp_path / "run"
    broken.mkdir()
    (broken / "run.json").write_bytes((run / "run.json").read_bytes())
    torch.save({"weight": torch.zeros(3)}, broken / "checkpoint.safetensors")
    assert_refused(capsys, "evaluate", broken, "--samples", 2, message="cannot be read as safetensors")


def test_no_reader_of_the_library_opens_pickles():
    from pathlib import Path

    import bayesattn

    for path in Path(bayesattn.__file__).parent.rglob("*.py"):
        text = path.read_text()
        # safetensors.torch.load is not the one that opens pickles
        assert not re.search(r"(?<!safetensors\.)torch\.load\(", text) or "weights_only=True" in text, path
        assert "yaml.unsafe" not in text, path
        assert "pickle.load" not in text, path


def texts_of(value, name=""):
    """Yield the names of all settings that are words, in nested dictionaries."""
    for key, item in value.items():
        if isinstance(item, dict):
            yield from texts_of(item, f"{name}{key}.")
        elif isinstance(item, str):
            yield f"{name}{key}"


SHORT = {
    "digits": ("soft", ["train_size=20", "training.epochs=2", "width=4", "num_heads=2"]),
    "graph": ("generated-soft", ["training.epochs=2", "num_heads=1", "head_dim=2"]),
}


@pytest.mark.parametrize("place", ["../../escape", "/escape"])
@pytest.mark.parametrize("recipe", SHORT)
def test_no_word_of_a_config_leads_out_of_the_run_folder(recipe, place, tmp_path, capsys):
    """No setting is a place to write to: a path is refused wherever a word may stand."""
    import dataclasses

    import bayesattn_recipes as recipes

    name, small = SHORT[recipe]
    config = dataclasses.asdict(recipes.RECIPES[recipe].load("train").load_config(name, small))
    words = list(texts_of(config))
    assert {"training.keep", "attention.variant"} <= set(words)
    out = tmp_path / "a" / "b" / "run"
    for word in words:
        options = [f"--set={setting}" for setting in (*small, f"{word}={place}")]
        assert_refused(capsys, "train", recipe, "--config", name, "--out", out, *options, message=word.split(".")[-1])
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and out not in path.parents]


def test_a_resumed_run_with_another_config_is_one_line(run, capsys):
    assert_refused(
        capsys, "train", "digits", "--config", "soft", "--out", run, *TINY, "--set=width=8", "--resume",
        message="config.width is 8 and was 4",
    )  # fmt: skip


def test_importing_the_library_opens_no_connection():
    code = (
        "import socket\n"
        "def refuse(*args, **options): raise AssertionError('a connection')\n"
        "socket.socket.connect = refuse\nsocket.getaddrinfo = refuse\n"
        "import bayesattn, bayesattn.cli.commands\nfrom bayesattn_recipes.digits import train\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
names = st.sampled_from(["attention", "training", "seed", "variant", "epochs", "kl_schedule", "kind", "noise"]) | st.text()
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4), max_leaves=12
)


def refusal(function, *arguments):
    """Return the message of a ValueError, or nothing; anything else is raised."""
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)
    return ""


@given(values=st.dictionaries(names, trees, max_size=4))
@settings(max_examples=80, deadline=None)
def test_any_values_give_a_config_or_a_clean_error(values):
    assert len(refusal(build_config, DigitsConfig, values)) < 3000


@given(text=st.text(max_size=80))
@settings(max_examples=80, deadline=None)
def test_any_text_is_yaml_or_a_clean_error(text):
    assert "\n" not in refusal(parse_yaml, text)


@given(setting=st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_setting_is_applied_or_refused(setting):
    assert "\n" not in refusal(override, {"attention": {"variant": "soft"}}, [setting])


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_change_of_a_predictions_file_is_read_or_refused(tmp_path, data):
    if not (tmp_path / "whole.safetensors").exists():
        splits = {"test": runs.SplitPredictions({"attention": torch.rand(2, 3, 4)}, torch.zeros(3, dtype=torch.int64))}
        runs.write_predictions(tmp_path, runs.Predictions(splits, list("abcd"), ["attention"], 0))
        (tmp_path / "predictions.safetensors").rename(tmp_path / "whole.safetensors")
    content = bytearray((tmp_path / "whole.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "predictions.safetensors").write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    refusal(runs.read_predictions, tmp_path)


@pytest.mark.parametrize(
    "meta",
    [
        {"splits": 3}, {"splits": "test"}, {"methods": [1]}, {"class_names": True}, {"key_grid": [1]}, {"key_grid": "ab"},
        {"splits": []},
    ],
)  # fmt: skip
def test_metadata_of_another_shape_is_refused(tmp_path, meta):
    plain = {"schema": runs.PREDICTIONS_SCHEMA, "splits": ["test"], "class_names": ["a"], "methods": ["mean"], "seed": 0}
    content = safetensors.torch.save({"0/samples/mean": torch.ones(1, 2, 1)}, {"bayesattn": json.dumps({**plain, **meta})})
    (tmp_path / "predictions.safetensors").write_bytes(content)
    with pytest.raises(files.RunError):
        runs.read_predictions(tmp_path)


def test_values_are_shown_on_one_short_line():
    deep = value = []
    for _ in range(5000):
        value.append([])
        value = value[0]
    for odd in ("x" * 10**6, deep, list(range(10**5)), "a\nb\x1b[0m", 10**4000):
        assert len(shown(odd)) < 300
        assert "\n" not in shown(odd)


def test_yaml_file_without_end_is_not_read(tmp_path):
    os.symlink("/dev/zero", tmp_path / "zero.yaml")
    with pytest.raises(ValueError, match="must be a file, got a device, pipe or socket"):
        load_yaml(tmp_path / "zero.yaml")
