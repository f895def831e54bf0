"""The benchmark harness: what it writes, what it refuses, and the one claim that does not depend on the clock."""

import csv
import dataclasses
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

import bayesattn as ba
from bayesattn_recipes.bench import attention, causal, harness, run_suite, step, vision
from bayesattn_recipes.bench.plot import plot_ratios


def test_ratios_are_to_the_first_provider_of_the_same_case_and_mode(tmp_path, capsys):
    suite = harness.Suite("toy", "cpu")
    small, large = torch.randn(40, 40), torch.randn(400, 400)
    suite.run("a", "base", "forward", lambda: small @ small)
    suite.run("a", "other", "forward", lambda: large @ large)
    suite.run("b", "base", "forward", lambda: large @ large)
    first, second, third = suite.rows
    assert first.ratio == third.ratio == 1.0
    assert second.ratio == pytest.approx(second.median_ms / first.median_ms)
    assert first.p20_ms <= first.median_ms <= first.p80_ms
    assert "other" in capsys.readouterr().out
    harness.write_csv(suite.rows, tmp_path / "toy.csv")
    with open(tmp_path / "toy.csv", newline="", encoding="utf-8") as file:
        written = list(csv.DictReader(file))
    assert [row["provider"] for row in written] == ["base", "other", "base"]
    assert {path.name for path in tmp_path.iterdir()} == {"toy.csv"}
    assert len(plot_ratios(suite.rows).axes) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_recorded_call_keeps_the_tensors_it_works_on():
    def make():
        counter = torch.zeros(1000, device="cuda")
        return counter, lambda: counter.add_(1.0)

    counter, call = make()
    watched = weakref.ref(counter)
    replay = harness.recorded(call)
    del counter, call
    gc.collect()
    kept = watched()
    assert kept is not None
    before = kept.clone()
    replay()
    assert torch.equal(kept, before + 1.0)


def test_calls_that_are_compared_take_turns_in_alternating_order():
    order: list[str] = []
    times = harness.measure_in_turn([lambda: order.append("a"), lambda: order.append("b")], rounds=3)
    assert order == [*"ab", *"ab", *"ba", *"ab"]  # a warm-up, then three rounds
    assert [len(row) for row in times] == [3, 3]


def test_the_ratio_of_a_comparison_is_the_median_over_its_rounds(monkeypatch, capsys):
    monkeypatch.setattr(harness, "measure_in_turn", lambda calls, rounds, clock: [[1.0, 2.0, 10.0], [2.0, 3.0, 11.0]])
    suite = harness.Suite("toy", "cpu")
    suite.compare("a", "forward", {"base": lambda: None, "other": lambda: None}, rounds=3)
    assert [row.ratio for row in suite.rows] == [1.0, 1.5]
    assert [row.median_ms for row in suite.rows] == [2.0, 3.0]
    assert "other" in capsys.readouterr().out


def test_the_step_suite_compares_the_same_model_before_and_after_its_conversion(monkeypatch, capsys):
    monkeypatch.setattr(step, "ROUNDS", 1)
    encoder = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    decoder = encoder | {"num_key_value_heads": 1, "vocab_size": 97, "use_cache": False}
    cases = [
        step.Case("bert", "bert", encoder, 2, 5, padding=2, modes=("plain",)),
        step.Case("albert", "albert", encoder, 2, 5, modes=("plain",)),
        step.Case("llama", "llama", decoder, 2, 5, modes=("plain",)),
    ]
    rows = step.run("cpu", cases)
    assert [row.provider for row in rows] == ["soft", "BAM-NOKL", "BAM-WC"] * 3
    assert [row.case for row in rows[::3]] == ["bert 2x5 padded 2", "albert 2x5", "llama 2x5"]
    assert {(row.suite, row.mode) for row in rows} == {("step", "plain")}
    assert "BAM-WC" in capsys.readouterr().out


def _tiny_bert(**options) -> tuple[step.Case, torch.nn.Module]:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 97}
    case = step.Case("bert", "bert", sizes | step.ENCODER, 3, 7, padding=2, **options)
    return case, case.build()


def test_a_timed_step_trains_the_model_and_its_prior():
    case, model = _tiny_bert()
    ba.bayesianize(model, ba.AttentionConfig("BAM-WC"))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    step.training_step(model, case.inputs("cpu"))()
    after = dict(model.named_parameters())
    assert not torch.equal(before["classifier.weight"], after["classifier.weight"])
    (prior,) = [name for name in before if name.endswith("bayes_prior.weight_in")]
    assert not torch.equal(before[prior], after[prior])


def test_the_step_suite_times_no_model_that_its_conversion_has_changed():
    case, model = _tiny_bert()
    other = case.build()
    with pytest.raises(RuntimeError, match=r"bert 3x7 padded 2: BAM-WC differs from the original.*nothing was timed"):
        step._check(case, {"soft": model, "BAM-WC": other}, case.inputs("cpu"))


@pytest.mark.compile
def test_a_compiled_step_is_one_graph():
    case, model = _tiny_bert()
    ba.bayesianize(model, ba.AttentionConfig("BAM-WC"))
    torch._dynamo.reset()
    before = model.classifier.weight.detach().clone()
    # traces as inductor does, and compiles nothing
    step.training_step(model, case.inputs("cpu"), compiler="aot_eager")()
    assert not torch.equal(before, model.classifier.weight)
    torch._dynamo.reset()


def test_the_named_models_have_the_sizes_that_their_names_say():
    llama = next(case for case in step.CASES["cuda"] if case.family == "llama")
    with torch.device("meta"):
        counts = [sum(p.numel() for p in case.build().parameters()) for case in (llama, step.CASES["cuda"][0])]
    assert counts[0] == pytest.approx(150e6, rel=0.05)
    assert counts[1] == pytest.approx(110e6, rel=0.05)


def test_the_causal_suite_times_every_variant_against_causal_attention(monkeypatch, capsys):
    monkeypatch.setattr(causal, "ROUNDS", 1)
    shape = (3, 4, 29, 8)
    layouts = [{}, {"key_heads": 2}, {"padding": 11}, {"window": 7}]
    cases = [causal.Case(shape, dataclasses.replace(causal.CAUSAL, **layout)) for layout in layouts]
    rows = causal.run("cpu", cases)
    assert list(dict.fromkeys(row.case for row in rows)) == [
        "3x4x29x8", "3x4(2)x29x8", "3x4x29x8 padded 11", "3x4x29x8 window 7",
    ]  # fmt: skip
    for case in cases:
        modes = {
            mode: [row.provider for row in rows if (row.case, row.mode) == (str(case), mode)]
            for mode in ("fwd+bwd", "forward")
        }
        masked = ["sdpa, same mask"] if case.layout.window or case.layout.padding else []
        assert modes == {
            "fwd+bwd": ["sdpa", "BAM-NOKL", "BAM-WC", "BAM-LC", *masked], "forward": ["sdpa", "BAM-WC", "BAM-LC", "observe"],
        }  # fmt: skip


def test_window_and_padding_are_the_entries_they_say():
    layout = attention.Layout(is_causal=True, window=2, padding=1)
    calls = attention.Calls((2, 1, 4, 8), "cpu", torch.float32, layout=layout)
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]], dtype=torch.bool)
    assert torch.equal(calls._dense[1, 0], expected)
    expected[:, 3] = False
    assert torch.equal(calls._dense[0, 0], expected)


def _wrong_by_backend(query, key, value, *, backend, **_):
    output = (query + key + value) * len(backend)
    return output, output.flatten(1).sum(1)


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    monkeypatch.setattr(attention, "attention", _wrong_by_backend)
    with pytest.raises(RuntimeError, match=r"BAM-NOKL: fused and reference differ by .*nothing was timed"):
        causal.run("cpu", [causal.Case((2, 3, 7, 8), causal.CAUSAL)])


def test_the_doubt_suite_compares_with_one_plain_pass_and_with_the_memory_of_a_kept_graph(capsys):
    doubt = pytest.importorskip("bayesattn_recipes.bench.doubt")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    rows = doubt.run("cpu", [doubt.Case("tiny", sizes, batch=2, length=8, rounds=1)])
    found = {(row.mode, row.provider): row for row in rows}
    assert list(found) == [
        ("time", "plain pass"),
        ("time", "doubt"),
        ("memory", "forward, graph kept"),
        ("memory", "doubt"),
        ("time, converted", "plain pass"),
        ("time, converted", "doubt, converted"),
    ]
    memory = found["memory", "doubt"]
    assert memory.ratio == memory.peak_mib / found["memory", "forward, graph kept"].peak_mib
    assert "tiny b2 n8" in capsys.readouterr().out


def test_the_vision_suite_times_both_models_with_soft_attention_first_and_last(capsys):
    mcan = ("model.width=8", "model.num_heads=2", "model.feedforward_dim=8")
    cases = [
        vision.Case("MCAN", "shapes", 5, 3, 7, 11, 13, 4, settings=mcan),
        vision.Case("Att2in", "shapes", 10, 3, 7, 11, 13, settings=("width=6", "attention_dim=5")),
    ]
    rows = vision.run("cpu", cases)
    assert [row.provider for row in rows] == ["soft", "BAM-NOKL", "BAM-WC", "soft, again"] * 2
    assert [row.case for row in rows[::4]] == ["MCAN shapes b5 t3 r7", "Att2in shapes b10 t3 r7"]
    assert "BAM-WC" in capsys.readouterr().out


@pytest.mark.parametrize("is_recipe", [False, True])
@pytest.mark.parametrize("model", ["MCAN", "Att2in"])
def test_a_timed_step_of_a_model_that_sees_is_a_training_step(model, is_recipe):
    sizes = {"MCAN": ("model.width=8", "model.num_heads=2", "model.feedforward_dim=8"), "Att2in": ("width=6",)}[model]
    experiment, training = vision.build(vision.Case(model, "shapes", 10, 3, 7, 11, 13, 4, settings=sizes), "wc")
    with (
        vision.recipe_step(experiment, training, "fp32")
        if is_recipe
        else nullcontext(vision.whole_step(experiment, training, "cpu"))
    ) as step:
        before = [parameter.detach().clone() for parameter in experiment.model.parameters()]
        step()
    assert all(not torch.equal(old, new) for old, new in zip(before, experiment.model.parameters()))


@pytest.mark.parametrize(("index", "words"), [(0, 20_572), (1, 9488), (3, 2540)])
def test_the_models_that_see_are_timed_at_the_sizes_of_their_data(index, words):
    case = vision.CASES["cuda"][index]
    experiment, training = vision.build(dataclasses.replace(case, regions=3, features=5), "soft")
    batch = experiment.pad(experiment.collate(torch.arange(training.batch_size)))
    assert batch["words"].shape == (case.batch, case.words)
    assert len(experiment.model.vocabulary.words) == words
    assert len(batch["regions"]) == (case.batch if case.model == "MCAN" else case.batch // 5)


def test_peak_memory_counts_what_is_alive_at_once():
    def two_at_once() -> None:
        a = torch.empty(2**20)
        b = torch.empty(2**20)
        del a, b

    def one_after_the_other() -> None:
        for _ in range(3):
            torch.empty(2**20)

    assert harness.peak_memory(two_at_once, device="cpu") == pytest.approx(8.0, abs=0.1)
    assert harness.peak_memory(one_after_the_other, device="cpu") == pytest.approx(4.0, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [4, 8])
def test_a_bayesian_training_step_needs_at_most_half_as_much_memory_again(heads):
    inputs = torch.randn(8, 256, 256)
    peaks = []
    for variant in ("soft", "BAM-WC"):
        config = ba.AttentionConfig(variant)
        layer = ba.nn.TransformerEncoderLayer(256, heads, 1024, dropout=0.0, batch_first=True, config=config)
        model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

        def train(model=model) -> None:
            with ba.record_kl() as kl:
                loss = model(inputs).square().mean()
            ba.elbo(loss, kl.total()).loss.backward()
            model.zero_grad(set_to_none=True)

        peaks.append(harness.peak_memory(train, device="cpu"))
    assert peaks[1] <= 1.5 * peaks[0]


@pytest.mark.parametrize(
    ("device", "out", "message"),
    [
        ("tpu", "x.csv", "device must be 'cpu' or 'cuda', got 'tpu'"),
        ("cpu", "x.txt", "out must be a path that ends in .csv, got 'x.txt'"),
    ],
)
def test_bad_arguments_are_named_before_anything_runs(tmp_path, monkeypatch, device, out, message):
    monkeypatch.chdir(tmp_path)
    from pathlib import Path

    with pytest.raises(ValueError, match=message):
        run_suite("step", device, Path(out))
    assert not list(tmp_path.iterdir())


def test_graph_suite_times_every_layer_against_pyg(capsys):
    graph = pytest.importorskip("bayesattn_recipes.bench.graph")
    rows = graph.run("cpu", [graph.Case(31, 97, 5)])
    assert [row.provider for row in rows if row.mode == "fwd+bwd"] == [
        "GATConv", "BAM-NOKL csr", "BAM-WC csr", "BAM-NOKL reference", "BAM-WC reference",
    ]  # fmt: skip
    assert [row.provider for row in rows if row.mode == "forward"] == ["GATConv", "BAM-NOKL csr", "BAM-NOKL reference"]
    assert rows[0].ratio == 1.0


@pytest.mark.parametrize("in_turns", [False, True])
def test_calls_are_timed_one_after_the_other_or_in_turns(capsys, in_turns):
    order: list[str] = []
    suite = harness.Suite("toy", "cpu")
    suite.run_all("a", "forward", {"base": lambda: order.append("a"), "other": lambda: order.append("b")}, in_turns=in_turns)
    assert [row.provider for row in suite.rows] == ["base", "other"]
    # with turns, the first call is heard again after the second
    assert ("a" in order[order.index("b") :]) == in_turns


def test_graph_suite_times_nothing_that_is_wrong(monkeypatch):
    graph = pytest.importorskip("bayesattn_recipes.bench.graph")
    from bayesattn.ops.segment import csr

    monkeypatch.setattr(csr, "softmax", lambda scores, edges, log_noise=None: scores.exp())
    with pytest.raises(RuntimeError, match=r"csr and reference differ by .*nothing was timed"):
        graph.run("cpu", [graph.Case(31, 97, 5)])


def test_rows_are_kept_one_by_one_until_the_run_is_whole(tmp_path, monkeypatch):
    out, seen = tmp_path / "x.csv", []

    def run(device, fail=False):
        suite = harness.Suite("causal", device)
        for name in ("base", "other"):
            suite.run("a", name, "forward", lambda: None)
            seen.append([row.provider for row in harness.read_csv(tmp_path / "x.partial.csv")])
        if fail:
            raise RuntimeError("cut short")
        return suite.rows

    monkeypatch.setattr(causal, "run", lambda device: run(device, fail=True))
    with pytest.raises(RuntimeError, match="cut short"):
        run_suite("causal", "cpu", out)
    assert [path.name for path in tmp_path.iterdir()] == ["x.partial.csv"]
    monkeypatch.setattr(causal, "run", run)
    run_suite("causal", "cpu", out)
    assert seen == [["base"], ["base", "other"]] * 2
    assert [row.provider for row in harness.read_csv(out)] == ["base", "other"]
    assert {path.name for path in tmp_path.iterdir()} == {"x.csv", "x.png"}


def test_the_attention_suite_has_a_row_for_every_provider(capsys):
    rows = attention.run("cpu", [(1, 2, 13, 16)])
    assert [(row.mode, row.provider) for row in rows] == [
        ("fwd+bwd", "sdpa"),
        ("fwd+bwd", "BAM-WC"),
        ("fwd+bwd", "BAM-WC eager"),
        ("forward", "sdpa"),
        ("forward", "BAM-WC"),
    ]


def test_a_stack_of_attention_calls_feeds_every_output_to_the_next_layer(monkeypatch):
    calls = attention.Calls((2, 3, 7, 8), "cpu", torch.float32, layers=5)
    outputs = []
    monkeypatch.setattr(calls, "_backward", lambda found, upstream: outputs.append(found))
    calls.soft(None)()
    calls.bayesian("reference")()
    ((soft,), (drawn, kl)) = outputs
    expected = calls.query
    for key, value in calls.pairs:
        expected = F.scaled_dot_product_attention(expected, key, value)
    torch.testing.assert_close(soft, expected)
    leaves = [calls.query, *(x for pair in calls.pairs for x in pair), *calls.priors]
    assert len(leaves) == 1 + 5 * 3
    gradients = torch.autograd.grad([drawn, kl], leaves, [calls.upstream, calls.weight])
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
