"""Graph data: official counts, files that lie are refused, splits never share a node, a generated graph that repeats."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from bayesattn_recipes.graph import pickles
from bayesattn_recipes.graph.config import load_config_graph
from bayesattn_recipes.graph.data import (
    Graph,
    leave_out_classes,
    load_graph,
    load_heterophilous,
    make_graph,
    random_split,
)
from bayesattn_recipes.graph.evaluate import add_feature_noise
from bayesattn_recipes.graph.generated import generate_graph
from bayesattn_recipes.graph.pickles import read_pickle
from bayesattn_recipes.graph.planetoid import load_planetoid
from bayesattn_recipes.graph.train import load_config
from data import shared_data
from helpers import no_type_checks

DATA = shared_data()
needs_planetoid = pytest.mark.skipif(DATA is None or not (DATA / "planetoid").is_dir(), reason="needs the Planetoid files")
needs_heterophilous = pytest.mark.skipif(
    DATA is None or not (DATA / "heterophilous_graphs").is_dir(), reason="needs the heterophilous graphs"
)


def is_connected(graph: Graph) -> torch.Tensor:
    """Return which nodes have a neighbor besides themselves."""
    source, target = graph.edge_index
    return torch.zeros(graph.num_nodes, dtype=torch.bool).index_fill(0, target[source != target], True)


@needs_planetoid
@pytest.mark.parametrize(
    ("name", "nodes", "edges", "features", "classes", "train"),
    [("cora", 2708, 13264, 1433, 7, 140), ("citeseer", 3327, 12431, 3703, 6, 120), ("pubmed", 19717, 108365, 500, 3, 60)],
)
def test_planetoid_graphs_have_the_published_counts(name, nodes, edges, features, classes, train):
    graph = load_graph(name, DATA)
    assert graph.features.shape == (nodes, features)
    assert graph.edge_index.shape == (2, edges)
    assert graph.num_classes == classes
    assert [len(graph.splits[split]) for split in ("train", "validation", "test")] == [train, 500, 1000]
    assert torch.bincount(graph.labels[graph.splits["train"]]).tolist() == [20] * classes
    # float32 rows divided by their sum; nodes without words stay zero
    total = graph.features.sum(dim=1)
    assert ((total - 1.0).abs() < 1e-5).logical_or(total == 0).all()


@needs_planetoid
def test_citeseer_nodes_without_a_class_stay_out_of_the_splits():
    graph = load_graph("citeseer", DATA)
    unknown = (graph.labels < 0).nonzero().flatten()
    assert len(unknown) == 15
    assert not set(unknown.tolist()) & set(torch.cat(list(graph.splits.values())).tolist())
    assert not graph.features[unknown].any()
    assert int((~is_connected(graph)).sum()) == 48


@needs_heterophilous
def test_heterophilous_graph_has_the_published_counts_and_ten_splits():
    graph = load_graph("chameleon_filtered", DATA, split=9)
    # 8,854 undirected edges and 890 self-loops
    assert graph.edge_index.shape == (2, 2 * 8854 + 890)
    assert graph.features.shape == (890, 2325)
    assert not torch.equal(graph.splits["test"], load_graph("chameleon_filtered", DATA).splits["test"])
    with pytest.raises(ValueError, match="split must be from 0 to 9 for chameleon_filtered, got 10"):
        load_graph("chameleon_filtered", DATA, split=10)


@needs_heterophilous
@pytest.mark.parametrize(
    ("name", "nodes", "edges", "features", "classes"),
    [
        ("chameleon", 890, 8854, 2325, 5),
        ("squirrel", 2223, 46998, 2089, 5),
        ("actor", 7600, 26659, 932, 5),
        ("minesweeper", 10000, 39402, 7, 2),
        ("tolokers", 11758, 519000, 10, 2),
    ],
)
def test_configs_of_heterophilous_graphs_take_the_split_of_the_seed(name, nodes, edges, features, classes):
    config = load_config(f"{name}-soft", ["seed=13"])
    graph = load_config_graph(config, DATA)
    assert graph.features.shape == (nodes, features)
    assert graph.edge_index.shape == (2, 2 * edges + nodes)
    assert graph.num_classes == classes
    assert torch.equal(graph.splits["test"], load_graph(config.dataset, DATA, split=3).splits["test"])
    for variant in ("nokl", "wc"):
        assert load_config(f"{name}-{variant}").dataset == config.dataset


def _write_npz(path, **changes):
    masks = np.array([[True, False, False, False], [False, True, False, False], [False, False, True, True]])
    arrays = {
        "node_features": np.ones((4, 2), dtype=np.float32),
        "node_labels": np.array([0, 1, 0, 1]),
        "edges": np.array([[0, 1], [2, 3]]),
        **{name: np.repeat(mask[None], 10, axis=0) for name, mask in zip(("train_masks", "val_masks", "test_masks"), masks)},
    }
    np.savez(path, **(arrays | changes))


def test_broken_npz_files_are_named(tmp_path):
    path = tmp_path / "actor.npz"
    _write_npz(path)
    assert load_heterophilous(tmp_path, "actor", 0).num_nodes == 4
    whole = path.read_bytes()
    for size in (0, 3, len(whole) // 2):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"actor\.npz cannot be read"):
            load_heterophilous(tmp_path, "actor", 0)
    # a byte of the features is wrong
    path.write_bytes(whole[:150] + bytes([whole[150] ^ 0xFF]) + whole[151:])
    with pytest.raises(ValueError, match=r"actor\.npz cannot be read"):
        load_heterophilous(tmp_path, "actor", 0)
    _write_npz(path, edges=np.array([[0, 1, 2]]))
    with pytest.raises(ValueError, match="do not match"):
        load_heterophilous(tmp_path, "actor", 0)
    _write_npz(path, edges=np.array([[0, 9]]))
    with pytest.raises(ValueError, match="edges of actor must end at nodes from 0 to 3, got 9"):
        load_heterophilous(tmp_path, "actor", 0)


# pickles


def _old_array(array):
    """Pickle an array as Python 2 and numpy of its time did, from opcodes."""
    raw = array.tobytes()
    code = array.dtype.str[1:].encode()
    shape = b"".join(b"J" + struct.pack("<i", length) for length in array.shape)
    return (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
        b"(K\x01(" + shape + b"tcnumpy\ndtype\n(U" + bytes([len(code)]) + code + b"K\x00K\x01tR"
        b"(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    )


def test_an_array_is_read_from_a_pickle(tmp_path):
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    (tmp_path / "a").write_bytes(b"\x80\x02" + _old_array(array) + b".")
    found = read_pickle(tmp_path / "a")
    assert found.dtype == np.int32
    assert np.array_equal(found, array)


class _Evil:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


def _setattr(name: bytes) -> bytes:
    """A pickle that gives whatever stands for a name an attribute `value`, as BUILD does with slots."""
    return b"\x80\x02" + name + b"NK\x01\x86b}."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(_Evil(eval, "1/0"), protocol=2), "imports '__builtin__.eval'"),
        (pickle.dumps(_Evil(print, "x"), protocol=4), "uses the instruction"),
        (pickle.dumps({1: [2.5]}, protocol=2), "uses the instruction BINFLOAT"),
        (b"\x80\x02cnumpy\nload\n.", "imports 'numpy.load'"),
        (b"\x80\x02cposix\nsystem\nU\x04true\x85R.", "imports 'posix.system'"),
        (b"\x80\x02(U\x04trueiposix\nsystem\n.", "uses the instruction INST"),
        (b"\x80\x02\x82\x01.", "uses the instruction EXT1"),
        (b"\x80\x04\x96\xff\xff\xff\xff\x00\x00\x00\x00.", "expected"),
        (b"\x80\x02cscipy.sparse.csr\ncsr_matrix\n)\x81}b.", "'_shape'"),
        (b"\x80\x02cscipy.sparse.csr\ncsr_matrix\nK\x07\x85R.", "takes no arguments"),
        (b"\x80\x02cnumpy\nndarray\nK\x07\x85R.", "not callable"),
        (
            b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nJ\xff\xff\xff\x7f\x85U\x01b\x87R.",
            "builds an array",
        ),
        (b"\x80\x02cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R.", "an array of type 'O8'"),
        (b"\x80\x02ccollections\ndefaultdict\ncnumpy\ndtype\n\x85R.", "not lists"),
        (b"\x80\x02}q\x01h\x01b.", "__dict__"),
        (b"\x80\x02K\x01.", "uses a value of type int in place of dict"),
        (b"\x80\x02h\x07.", "7"),
        (b"\x80\x02]", "pickle exhausted"),
        (b"", "pickle exhausted"),
        (b"\x80\x02T\xff\xff\xff\x7fabc", "expected 2147483647 bytes"),
        (b"\x80\x02" + b")" + b"\x85" * 1_000_000 + b".", "more than 100 tuples"),
        *((_setattr(name), "") for name in (b"cnumpy\nndarray\n", b"cnumpy\ndtype\n", b"cscipy.sparse.csr\ncsr_matrix\n")),
    ],
)
def test_other_pickles_are_refused_by_what_they_ask_for(tmp_path, content, message):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(ValueError, match="is not a file of the Planetoid data sets") as error:
        read_pickle(tmp_path / "bad")
    assert message in str(error.value)


def test_a_file_is_refused_before_anything_of_it_runs(tmp_path, monkeypatch):
    # the evil name comes last, after a whole array
    array = _old_array(np.arange(3, dtype=np.int32))
    (tmp_path / "late").write_bytes(b"\x80\x02" + array + b"cbuiltins\neval\nU\x031/0\x85R.")
    loads = []
    monkeypatch.setattr(pickles._Unpickler, "load", lambda self: loads.append(self))
    with pytest.raises(ValueError, match=r"imports 'builtins\.eval'"):
        read_pickle(tmp_path / "late")
    assert not loads


def test_a_pickle_cannot_ask_for_more_memory_than_it_has_bytes(tmp_path):
    # an array that claims 2^31 rows; a memo entry of number 2^32 − 1; one long list under many keys
    huge = _old_array(np.arange(3, dtype=np.int32)).replace(b"J" + struct.pack("<i", 3), b"J" + struct.pack("<i", 2**31 - 1))
    (tmp_path / "huge").write_bytes(b"\x80\x02" + huge + b".")
    with pytest.raises(ValueError, match="an array of 8589934588 bytes with 12 bytes"):
        read_pickle(tmp_path / "huge")
    (tmp_path / "memo").write_bytes(b"\x80\x02}r\xff\xff\xff\xff(K\x01]q\x00u.")
    with pytest.raises(ValueError, match="under the number 4294967295"):
        read_pickle(tmp_path / "memo")
    shared = b"\x80\x02}(K\x00](" + b"K\x01" * 50 + b"eq\x01" + b"".join(b"K%ch\x01" % key for key in range(1, 200)) + b"u."
    (tmp_path / "shared").write_bytes(shared)
    with pytest.raises(ValueError, match="more neighbors than it has bytes"):
        read_pickle(tmp_path / "shared")


@needs_planetoid
@pytest.mark.parametrize(
    ("part", "message"), [("tx", "not a file of the Planetoid"), ("graph", "not a file of the Planetoid")]
)
def test_a_truncated_file_is_named(tmp_path, part, message):
    for path in (DATA / "planetoid").glob("ind.cora.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = (tmp_path / f"ind.cora.{part}").read_bytes()
    (tmp_path / f"ind.cora.{part}").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f"ind.cora.{part} is {message}"):
        load_planetoid(tmp_path, "cora")


@needs_planetoid
def test_a_part_in_the_place_of_another_is_named(tmp_path):
    for path in (DATA / "planetoid").glob("ind.cora.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "ind.cora.graph").write_bytes((tmp_path / "ind.cora.y").read_bytes())
    with pytest.raises(ValueError, match=r"ind\.cora\.graph must hold a dict, got ndarray"):
        load_planetoid(tmp_path, "cora")
    (tmp_path / "ind.cora.graph").unlink()
    with pytest.raises(ValueError, match=r"ind.cora.graph cannot be read: No such file"):
        load_planetoid(tmp_path, "cora")


# graphs


def _parts(**changes):
    splits = {"train": torch.tensor([0, 1]), "validation": torch.tensor([2]), "test": torch.tensor([3, 4])}
    parts = {
        "name": "g",
        "features": torch.ones(5, 3),
        "labels": torch.tensor([0, 1, 0, 1, 0]),
        "edges": torch.tensor([[0, 1], [1, 0], [3, 3]]),
        "splits": splits,
        "class_names": ["a", "b"],
    }
    return parts | changes


def test_edges_are_made_undirected_and_unique_with_one_self_loop_each():
    graph = make_graph(**_parts())
    assert graph.edge_index.T.tolist() == [[0, 0], [1, 0], [0, 1], [1, 1], [2, 2], [3, 3], [4, 4]]
    assert is_connected(graph).tolist() == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edges": torch.tensor([[0, 5]])}, "edges of g must end at nodes from 0 to 4, got 5"),
        ({"edges": torch.tensor([[-1, 2]])}, "edges of g must end at nodes from 0 to 4, got -1"),
        ({"labels": torch.tensor([0, 1, 0, -1, 0])}, "split 'test' of g holds a node without a class"),
        ({"labels": torch.tensor([0, 1])}, "g must have one label for each of its 5 nodes, got 2"),
        ({"features": torch.full((5, 3), torch.nan)}, "features of g must be finite, got NaN"),
        (
            {"splits": {"train": torch.tensor([0, 1]), "test": torch.tensor([1])}},
            "splits 'train' and 'test' of g must not share a node",
        ),
        ({"splits": {"train": torch.tensor([0, 0])}}, "split 'train' of g must not hold a node twice"),
        ({"splits": {"train": torch.tensor([7])}}, "split 'train' of g must hold at least one node, all from 0 to 4"),
        (
            {"splits": {"train": torch.tensor([], dtype=torch.int64)}},
            "split 'train' of g must hold at least one node, all from 0 to 4",
        ),
    ],
)
def test_a_graph_that_does_not_fit_together_is_refused(monkeypatch, changes, message):
    no_type_checks(monkeypatch)
    with pytest.raises(ValueError, match=message):
        make_graph(**_parts(**changes))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load_graph("corra"), "dataset must be one of generated, cora, .*, got 'corra'"),
        (
            lambda: load_graph("cora", None),
            "cora needs data, the folder of the data sets. Give it with --data or BAYESATTN_DATA",
        ),
        (lambda: random_split(generate_graph(), 0), "split must be above 0 for a random split .*, got 0"),
        (lambda: load_graph("actor", Path("nowhere")), "actor.npz does not exist"),
        (lambda: generate_graph(10, num_train=6, num_validation=4), "nodes left for testing"),
        (lambda: leave_out_classes(generate_graph(), 4), "left_out_classes must be from 0 to 3 for generated, got 4"),
    ],
)
def test_bad_names_and_numbers_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_generated_graph_repeats_with_its_seed_and_has_isolated_nodes():
    first, again, other = generate_graph(seed=3), generate_graph(seed=3), generate_graph(seed=4)
    assert torch.equal(first.features, again.features)
    assert torch.equal(first.edge_index, again.edge_index)
    assert not torch.equal(first.labels, other.labels)
    assert torch.bincount(first.labels[first.splits["train"]]).tolist() == [20] * 5
    assert (~is_connected(first)).any()


def test_random_splits_have_the_sizes_of_the_public_one_and_differ():
    graph = generate_graph()
    one, again, other = random_split(graph, 1), random_split(graph, 1), random_split(graph, 2)
    for name, nodes in graph.splits.items():
        assert len(one.splits[name]) == len(nodes)
        assert torch.equal(one.splits[name], again.splits[name])
        assert not torch.equal(one.splits[name], other.splits[name])
    counts = [g.labels[g.splits["train"]].bincount(minlength=g.num_classes) for g in (graph, one, other)]
    assert torch.equal(counts[0], counts[1])
    assert torch.equal(counts[0], counts[2])
    taken = torch.cat(list(one.splits.values()))
    assert len(taken.unique()) == len(taken)


def test_left_out_classes_leave_every_split_and_stay_in_the_graph():
    graph = generate_graph(200, num_train=50, num_validation=50)
    less = leave_out_classes(graph, 2)
    assert less.class_names == graph.class_names[:3]
    assert all(int(less.labels[less.splits[name]].max()) < 3 for name in ("train", "validation", "test"))
    assert (less.labels[less.splits["left-out"]] >= 3).all()
    assert less.num_nodes == graph.num_nodes


# noisy features


def test_feature_noise_has_the_size_it_says_and_changes_nothing_else():
    graph = generate_graph(300, num_train=50, num_validation=50)
    noisy = add_feature_noise(graph, 2.0)
    expected = 2.0 * float(graph.features[graph.splits["train"]].std(correction=0))
    # 60,000 normal draws: the standard error of the deviation is 0.29 % of it; five of them
    assert abs(float((noisy.features - graph.features).std()) / expected - 1.0) < 5 * 0.0029
    assert noisy.edge_index is graph.edge_index
    assert noisy.labels is graph.labels
    with pytest.raises(ValueError, match=r"strength must be a finite number of at least 0, got -1\.0"):
        add_feature_noise(graph, -1.0)
