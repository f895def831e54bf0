"""Labels of compared runs say what differs, and no more."""

from bayesattn.evaluation.report.gather import row_labels


def run_json(recipe, variant, **config):
    return {"recipe": recipe, "variant": variant, "config": config}


def test_runs_of_two_recipes_are_told_apart_by_the_recipe_alone():
    digits = {"width": 32, "training": {"epochs": 80, "patience": None}}
    graph = {"dataset": "generated", "training": {"epochs": 200, "patience": 100}, "dropout": 0.4}
    runs = [run_json(name, variant, **config) for name, config in (("digits", digits), ("graph", graph)) for variant in "sw"]
    assert row_labels(runs) == ["digits s", "digits w", "graph s", "graph w"]


def test_label_says_what_differs_shortly_and_words_first():
    shared = {"epochs": 5, "heads": {"size": 3}}
    first = run_json("graph", "soft", rate=0.0100000001, dropout=0.4, decay=1, dataset="cora", **shared)
    second = run_json("graph", "soft", rate=0.02, dropout=0.6, decay=2, dataset="x" * 50 + "/pubmed", **shared)
    assert row_labels([first, second]) == [
        "soft dataset=cora rate=0.01 +2 more",
        "soft dataset=xxxxxxxxxxxx…xxxxx/pubmed rate=0.02 +2 more",
    ]


def test_labels_are_never_the_same():
    # every value is needed; names and short texts that would coincide are written out
    configs = [
        {"a": {"k": a}, "b": {"k": b}, "path": f"{'x' * 30}{path}{'y' * 30}"}
        for a in (1, 2)
        for b in (1, 2)
        for path in "pq"
    ]
    configs.append({"a": {"k": 1}, "b": {"k": 1}})
    labels = row_labels([run_json("graph", "soft", **config) for config in configs])
    assert len(set(labels)) == 9
    assert labels[0] == f'soft path="{"x" * 30}p{"y" * 30}" a.k=1 b.k=1'
    assert labels[8] == "soft path=– a.k=1 b.k=1"
