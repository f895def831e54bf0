"""Saved models go to the Hub and come back; the Hub is a stand-in on this machine."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_server import TOKEN, Repository, serving
from huggingface_hub import constants
from zoo import build

import bayesattn as ba
from bayesattn.convert import MeasuredUncertainty, bayesianize, conversion_report, load_bayesian, save_bayesian
from bayesattn.convert.saved import CONFIG_FILE, WEIGHTS_FILE

CONFIG = ba.AttentionConfig("BAM-WC", weibull_k=3.0)
NAME = "owner/doubtful-bert"
# huggingface_hub sends bytes in a way that httpx would rather not have
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")


def local_address(host, *arguments, find=socket.getaddrinfo, **options):
    assert host == "127.0.0.1", f"a test asked for {host}"
    return find(host, *arguments, **options)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The stand-in; huggingface_hub's cache is a folder of the test, nobody is logged in, and no other host is reached."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    template = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(socket, "getaddrinfo", local_address)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with serving() as state:
        yield state
    assert not state.unknown


def push(hub, folder, model, **options):
    return save_bayesian(model, folder, push_to_hub=NAME, token=TOKEN, endpoint=hub.endpoint, **options)


def test_a_whole_model_goes_to_a_private_repository_and_comes_back(hub, tmp_path):
    model = bayesianize(build("bert"), CONFIG)
    url = push(hub, tmp_path / "folder", model, whole=True)
    assert url.startswith(f"{hub.endpoint}/{NAME}/commit/")
    assert hub.repositories[NAME].private
    assert set(hub.files(NAME)) == {CONFIG_FILE, WEIGHTS_FILE, "README.md"}
    torch.manual_seed(99)
    loaded = load_bayesian(build("bert"), NAME, token=TOKEN, endpoint=hub.endpoint)
    assert conversion_report(loaded) == conversion_report(model)
    state = model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in loaded.state_dict().items())
    # a second time from the cache: no file is fetched again
    fetched = [request for request in hub.requests if request.startswith("GET") and "/resolve/" in request]
    load_bayesian(build("bert"), NAME, token=TOKEN, endpoint=hub.endpoint)
    assert [r for r in hub.requests if r.startswith("GET") and "/resolve/" in r] == fetched


def test_the_hosts_files_go_along_and_nothing_pickled_does(hub, tmp_path):
    model = bayesianize(build("bert"), CONFIG)
    model.save_pretrained(tmp_path / "folder")
    for name in ("optimizer.pt", "training_args.bin", "data.pkl"):
        (tmp_path / "folder" / name).write_bytes(b"pickled")
    (tmp_path / "folder" / "checkpoint-1").mkdir()
    (tmp_path / "folder" / "checkpoint-1" / "model.safetensors").write_bytes(b"older")
    push(hub, tmp_path / "folder", model, private=False)
    assert set(hub.files(NAME)) == {CONFIG_FILE, WEIGHTS_FILE, "README.md", "config.json", "model.safetensors"}
    assert not hub.repositories[NAME].private
    # the host's weights are not fetched for the priors
    load_bayesian(build("bert"), NAME, endpoint=hub.endpoint)
    assert not any("/model.safetensors" in request for request in hub.requests if request.startswith("GET"))


def test_a_checkpoint_of_the_host_alone_is_read(hub, tmp_path):
    model = bayesianize(build("bert"), CONFIG)
    model.save_pretrained(tmp_path / "folder")
    repository = hub.repositories[NAME] = Repository(private=False)
    repository.commit("main", {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()})
    loaded = load_bayesian(build("bert"), NAME, endpoint=hub.endpoint)
    assert conversion_report(loaded) == conversion_report(model)


def test_revisions_are_branches_and_commits(hub, tmp_path):
    model = bayesianize(build("bert"), CONFIG)
    push(hub, tmp_path / "one", model)
    first = hub.repositories[NAME].branches["main"]
    other = bayesianize(build("bert"), ba.AttentionConfig("BAM-WC", weibull_k=7.0))
    push(hub, tmp_path / "two", other, revision="louder")
    for revision, k in (("louder", 7.0), ("main", 3.0), (first, 3.0)):
        loaded = load_bayesian(build("bert"), NAME, revision=revision, token=TOKEN, endpoint=hub.endpoint)
        assert f"weibull_k = {k:g}" in str(conversion_report(loaded))


@pytest.mark.parametrize(
    ("where", "options", "message"),
    [
        ("owner/nothing", {}, r"no folder 'owner/nothing' here, and http://127.* has no such repository.*token="),
        (NAME, {}, r"no such repository that you may read; check the name, and if it is private give token="),
        (NAME, {"token": TOKEN, "revision": "v9"}, r"has no revision 'v9'. Give a branch, a tag or a commit"),
        ("owner/empty", {}, rf"owner/empty holds neither {CONFIG_FILE} nor a safetensors file"),
        ("owner/half", {}, rf"has {CONFIG_FILE} but not {WEIGHTS_FILE}"),
        ("nowhere", {}, r"'nowhere' is not a folder on this machine, and a repository on the Hub is written 'owner/name'"),
        (Path("owner/nothing"), {}, r"is not a folder on this machine"),
        ("folder/one", {"revision": "main"}, r"revision is 'main', but 'folder/one' is a folder on this machine"),
    ],
)
def test_what_cannot_be_loaded_is_explained_and_the_model_stays(hub, tmp_path, where, options, message):
    push(hub, tmp_path / "folder" / "one", bayesianize(build("bert"), CONFIG))
    hub.repositories["owner/empty"] = Repository(private=False)
    hub.repositories["owner/empty"].commit("main", {"notes.txt": b"later"})
    hub.repositories["owner/half"] = Repository(private=False)
    hub.repositories["owner/half"].commit("main", {CONFIG_FILE: hub.files(NAME)[CONFIG_FILE]})
    model = build("bert")
    with pytest.raises(ValueError, match=message):
        load_bayesian(model, where, endpoint=hub.endpoint, **options)
    assert not conversion_report(model).converted


def test_a_hub_that_cannot_be_reached_is_named(hub):
    with pytest.raises(ValueError, match=r"http://127.0.0.1:9 cannot be reached, and no copy .* is in the cache"):
        load_bayesian(build("bert"), NAME)


@pytest.mark.parametrize("token", [None, "hf_of_someone_else"])
def test_without_a_token_that_may_write_nothing_is_pushed(hub, tmp_path, token):
    model = bayesianize(build("bert"), CONFIG)
    with pytest.raises(
        ValueError,
        match=r"did not let you write to owner/doubtful-bert. Use an account that may: give token=",
    ):
        save_bayesian(model, tmp_path / "folder", push_to_hub=NAME, token=token, endpoint=hub.endpoint)
    assert not hub.repositories
    # what was asked for first is done
    load_bayesian(build("bert"), tmp_path / "folder")


def test_options_of_the_hub_need_a_repository(tmp_path):
    model = bayesianize(build("bert"), CONFIG)
    with pytest.raises(ValueError, match="Give push_to_hub='owner/name' as well"):
        save_bayesian(model, tmp_path / "folder", revision="main")
    with pytest.raises(ValueError, match="push_to_hub must be the name of a repository, 'owner/name', got 'bert'"):
        save_bayesian(model, tmp_path / "folder", push_to_hub="bert")
    assert not (tmp_path / "folder").exists()


def test_an_existing_folder_wins_and_needs_no_hub(hub, tmp_path):
    save_bayesian(bayesianize(build("bert"), CONFIG), NAME)
    assert conversion_report(load_bayesian(build("bert"), NAME)).converted
    assert not hub.requests


def test_folders_do_not_import_huggingface_hub(tmp_path):
    code = f"""
import sys, torch
import bayesattn as ba
model = ba.bayesianize(torch.nn.MultiheadAttention(6, 2), ba.AttentionConfig("BAM-WC"))
ba.save_bayesian(model, {str(tmp_path / "folder")!r}, whole=True)
ba.load_bayesian(torch.nn.MultiheadAttention(6, 2), {str(tmp_path / "folder")!r})
print("huggingface_hub" in sys.modules)
sys.modules["huggingface_hub"] = None
try:
    ba.load_bayesian(torch.nn.MultiheadAttention(6, 2), "owner/name")
except ModuleNotFoundError as error:
    print(error)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown == ["False", "loading from the Hugging Face Hub needs the extra 'hf': pip install 'bayesattn[hf]'"]


def scored(n: int = 400) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probabilities, doubt and labels; doubt sees the errors, confidence does not."""
    generator = torch.Generator().manual_seed(0)
    first = 0.5 + torch.rand(n, generator=generator, dtype=torch.float64) / 2.0
    labels = (torch.rand(n, generator=generator) < 0.2).long()
    doubt = labels.double() + torch.rand(n, generator=generator, dtype=torch.float64) / 2.0
    return torch.stack([first, 1.0 - first], dim=1), doubt, labels


def test_measured_uncertainty_is_that_of_the_metrics():
    probabilities, doubt, labels = scored()
    measured = MeasuredUncertainty.of(probabilities, doubt, labels, data="made up", risk=0.05)
    right = (labels == 0).double()
    assert measured.accuracy == pytest.approx(float(right.mean()))
    assert measured.aurc_doubt == pytest.approx(float(ba.metrics.aurc(-doubt, right)))
    assert measured.aurc_confidence == pytest.approx(float(ba.metrics.aurc(probabilities.amax(dim=1), right)))
    low, high = measured.difference_interval
    assert low < measured.aurc_doubt - measured.aurc_confidence < high < 0.0
    # every right answer comes first, then errors until they are a twentieth of what is answered
    answered = int(right.sum())
    errors = max(e for e in range(len(labels) - answered) if e / (answered + e) <= 0.05)
    assert measured.coverage_doubt == pytest.approx((answered + errors) / len(labels))
    assert measured.coverage_confidence < measured.coverage_doubt


def test_the_card_shows_what_was_measured_and_keeps_what_others_wrote(hub, tmp_path):
    model = bayesianize(build("bert"), CONFIG)
    measured = MeasuredUncertainty.of(*scored(), data="made\nup <b>", risk=0.1)
    push(hub, tmp_path / "folder", model, measured=measured)
    card = hub.files(NAME)["README.md"].decode()
    assert card.startswith("---\nlibrary_name: bayesattn\n")
    assert f"ba.load_bayesian(model, {json.dumps(NAME)})" in card
    assert f"| doubt | {measured.aurc_doubt:.4f} | {measured.coverage_doubt:.1%} |" in card
    assert "made up &lt;b>" in card
    section = card.partition("uncertainty\n---\n")[2]
    (tmp_path / "folder" / "README.md").write_text(f"# Mine\n\nBefore.\n\n{section}\nAfter.\n")
    save_bayesian(model, tmp_path / "folder")
    again = (tmp_path / "folder" / "README.md").read_text()
    assert again.startswith("# Mine\n\nBefore.\n")
    assert again.endswith("\nAfter.\n")
    assert again.count("## Uncertainty") == 1
    assert "AURC" not in again
