"""Questions, vocabularies and accuracies: official formats, exact counts, and errors instead of wrong pairings."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bayesattn_recipes.vision.annotations import Question
from bayesattn_recipes.vqa import ask, daquar, vqa2
from bayesattn_recipes.vqa.accuracy import soft_accuracy, soft_targets, wordnet, wups
from bayesattn_recipes.vqa.data import DataConfig, build_vocabulary, load_splits
from bayesattn_recipes.vqa.train import VQAConfig, VQAExperiment, load_config
from bayesattn_recipes.vqa.vocabulary import Vocabulary, normalize_answer, tokenize
from data import shared_data


@pytest.mark.parametrize(
    ("num_same", "paper", "official"), [(0, 0, 0), (1, 1 / 3, 0.3), (2, 2 / 3, 0.6), (3, 1, 0.9), (4, 1, 1), (10, 1, 1)]
)
def test_soft_accuracy_of_ten_annotators(num_same, paper, official):
    assert soft_accuracy(num_same, 10) == pytest.approx(paper)
    assert soft_accuracy(num_same, 10, "leave_one_out") == pytest.approx(official)


@pytest.mark.parametrize("num_annotators", [3, 5, 7, 10])
def test_leave_one_out_is_the_mean_over_all_sets_without_one_annotator(num_annotators):
    for num_same in range(num_annotators + 1):
        said = [True] * num_same + [False] * (num_annotators - num_same)
        subsets = itertools.combinations(said, num_annotators - 1)
        expected = np.mean([min(sum(subset) / 3, 1) for subset in subsets])
        assert soft_accuracy(num_same, num_annotators, "leave_one_out") == pytest.approx(expected)


def test_one_annotator_means_exact_match():
    assert [soft_accuracy(count, 1, form) for count in (0, 1) for form in ("paper", "leave_one_out")] == [0, 0, 1, 1]


def test_answer_outside_the_vocabulary_has_no_target():
    vocabulary = Vocabulary.build(["is it?"], ["yes", "no"])
    question = Question("a", "is it?", ("yes",) * 4 + ("maybe",) * 6, "yes/no")
    targets = soft_targets([question], vocabulary, "paper")
    assert targets[0, vocabulary.answer_index["yes"]] == 1.0
    assert float(targets.sum()) == 1.0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Yes.", "yes"),
        ("The  Cat!", "cat"),
        ("two", "2"),
        ("1,000", "1000"),
        ("3.5", "3.5"),
        ("dont know", "don't know"),
        ("none", "0"),
    ],
)
def test_answers_are_normalized_as_the_evaluation_compares_them(given, expected):
    assert normalize_answer(given) == expected


def test_vocabulary_keeps_frequent_words_and_answers_first():
    vocabulary = Vocabulary.build(["a b b", "b c"], ["x", "y", "y"], word_min_count=1, answer_min_count=1, max_words=2)
    assert vocabulary.words[2:] == ("b", "a", "c")
    assert vocabulary.answers == ("y", "x")
    words, mask = vocabulary.encode(["c b a", "zebra", ""])
    assert mask.tolist() == [[True, True], [True, False], [True, False]]
    assert words.tolist() == [[4, 2], [1, 0], [1, 0]]
    assert vocabulary.unknown("b zebra") == ["zebra"]


def test_vocabulary_survives_the_checkpoint():
    vocabulary = Vocabulary.build(["was kostet’s, größer?"], ["ja", "nein"], max_words=7)
    assert Vocabulary.from_tensor(vocabulary.to_tensor()) == vocabulary
    with pytest.raises(ValueError, match="vocabulary cannot be read"):
        Vocabulary.from_tensor(torch.tensor([255, 0], dtype=torch.uint8))


def test_wups_counts_sets_and_near_misses():
    class Sense:
        def __init__(self, word):
            self.word = word

        def wup_similarity(self, other):
            return {"chair": {"stool": 0.95, "lamp": 0.5}}.get(self.word, {}).get(other.word, 0.2)

    class Reader:
        def synsets(self, word, pos):
            return [Sense(word)]

    assert wups(["chair"], ["chair"], 0.9, Reader()) == 1.0
    assert wups(["chair"], ["stool"], 0.9, Reader()) == pytest.approx(0.95)
    assert wups(["chair"], ["lamp"], 0.9, Reader()) == pytest.approx(0.05)
    assert wups(["table, chair"], ["chair, table"], 0.9, Reader()) == 1.0
    assert wups(["chair"], ["chair, lamp"], 0.0, Reader()) == pytest.approx(0.5)


def test_wups_without_nltk_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "nltk.corpus", None)
    with pytest.raises(ValueError, match="WUPS needs the package 'nltk'"):
        wordnet()


# DAQUAR


def write_daquar(folder, *, pairs=None, train=("image1",), test=("image2",)):
    folder.mkdir(parents=True)
    pairs = pairs or [("how many chairs are in the image1 ?", "2"), ("what is on the table in the image2 ?", "lamp, book")]
    (folder / "all_qa_pairs.txt").write_text("".join(f"{question}\n{answer}\n" for question, answer in pairs))
    (folder / "train_images_list.txt").write_text("\n".join(train))
    (folder / "test_images_list.txt").write_text("\n".join(test))


def test_daquar_questions_lose_their_image_and_lists_their_order(tmp_path):
    write_daquar(tmp_path / "daquar")
    questions = daquar.read_questions(tmp_path / "daquar")
    assert questions["train"] == [Question("image1", "how many chairs are ?", ("2",), "number")]
    assert questions["test"] == [Question("image2", "what is on the table ?", ("book, lamp",), "object")]


def test_answers_that_are_lists_are_told_from_single_ones():
    answers = ("night_stand", "lamp, chair", "2")
    assert [daquar.is_single(daquar.sort_answer(answer)) for answer in answers] == [True, False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test": ("image1", "image2")}, "1 images are in both splits, 'image1' first"),
        ({"test": ("image3",)}, "'image2' of question 2 is in neither split"),
        ({"pairs": [("what is this ?", "lamp")]}, "question 1 names no image"),
    ],
)
def test_daquar_questions_without_a_place_are_refused(options, message, tmp_path):
    write_daquar(tmp_path / "daquar", **options)
    with pytest.raises(ValueError, match=message):
        daquar.read_questions(tmp_path / "daquar")


@pytest.mark.skipif(shared_data() is None, reason="no shared data")
def test_daquar_has_its_official_counts():
    questions = daquar.read_questions(shared_data() / "daquar")
    assert {name: len(members) for name, members in questions.items()} == {"train": 6795, "test": 5673}
    # one image of each list has no question
    assert {name: len({q.image for q in members}) for name, members in questions.items()} == {"train": 794, "test": 653}
    assert not any("image" in tokenize(q.text)[-1] for members in questions.values() for q in members)


@pytest.mark.skipif(shared_data() is None, reason="no shared data")
def test_daquar_validation_shares_no_image_with_training():
    splits = load_splits(DataConfig("daquar"), shared_data())
    images = {name: {question.image for question in split.questions} for name, split in splits.items()}
    assert images["train"].isdisjoint(images["validation"])
    assert len(images["train"] | images["validation"]) == 794
    values, mask = splits["test"].gather(torch.tensor([0, 5672]))
    assert values.shape == (2, 63, 512)
    assert bool(mask.all())


# VQA-v2


def coco_name(coco, image):
    return f"COCO_{coco}_{image:012d}.jpg"


def write_vqa2(folder, *, features=("train", "val"), change=lambda asked, answered: None, name=coco_name):
    """Three questions per split about two images in the official layout, with 3 and 5 regions of 6 channels."""
    (folder / "features").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number, coco in enumerate(("train2014", "val2014")):
        images = [9 + 10 * number, 25 + 10 * number]
        asked = [
            {
                "question_id": 100 * image + k,
                "image_id": image,
                "question": ("Is it red?", "How many?", "What is it?")[k % 3],
            }
            for image in images
            for k in range(3)
        ]
        answered = [
            {
                "question_id": entry["question_id"],
                "image_id": entry["image_id"],
                "answer_type": ("yes/no", "number", "other")[entry["question_id"] % 3],
                "answers": [
                    {"answer_id": i, "answer": ("Yes", "2", "the cat", "no")[int(rng.integers(4))]} for i in range(10)
                ],
            }
            for entry in reversed(asked)
        ]
        change(asked, answered)
        (folder / f"v2_OpenEnded_mscoco_{coco}_questions.json").write_text(json.dumps({"questions": asked}))
        (folder / f"v2_mscoco_{coco}_annotations.json").write_text(json.dumps({"annotations": answered}))
        if coco.removesuffix("2014") in features:
            for image, count in zip(images, (3, 5)):
                np.savez(folder / "features" / f"{name(coco, image)}.npz", x=rng.random((6, count)))


def test_vqa2_pairs_questions_answers_and_features_by_their_ids(tmp_path):
    write_vqa2(tmp_path / "vqa2")
    splits = load_splits(DataConfig("vqa2", validation_share=0.0), tmp_path)
    assert {name: len(split) for name, split in splits.items()} == {"train": 6, "test": 6}
    question = splits["test"].questions[0]
    assert question.image == "COCO_val2014_000000000019.jpg"
    assert len(question.answers) == 10
    assert set(question.answers) <= {"yes", "2", "cat", "no"}
    _, mask = splits["train"].gather(torch.tensor([0, 3]))
    assert mask.sum(dim=1).tolist() == [3, 5]


def test_vqa2_features_may_go_by_the_numbers_of_the_images(tmp_path):
    write_vqa2(tmp_path / "vqa2", name=lambda coco, image: str(image))
    split = load_splits(DataConfig("vqa2", validation_share=0.0), tmp_path)["test"]
    assert [split.regions.names[place] for place in split.places.tolist()] == ["19"] * 3 + ["35"] * 3
    # a question of one's own about a photo of the set finds its features the same way
    regions, name = ask._find(load_config("vqa2-wc"), Path("COCO_val2014_000000000035.jpg"), None, tmp_path)
    assert (name, len(regions)) == ("35", 4)


def test_vqa2_trains_from_its_official_files(tmp_path):
    write_vqa2(tmp_path / "vqa2")
    settings = ["model.width=8", "model.num_heads=2", "model.num_layers=1", "data.answer_min_count=1", "model.word_dim=4"]
    experiment = VQAExperiment(load_config("vqa2-wc", [*settings, "model.feedforward_dim=8", "model.fused_dim=8"]), tmp_path)
    batch = experiment.collate(torch.arange(5))
    assert batch["regions"].shape == (5, 5, 6)
    experiment.nll(experiment.model, batch).backward()
    assert all(parameter.grad is not None for name, parameter in experiment.model.named_parameters() if "prior" not in name)


def test_vqa2_names_a_missing_feature_file(tmp_path):
    write_vqa2(tmp_path / "vqa2", features=("train",))
    with pytest.raises(
        ValueError, match=r"2 of 2 images of the test questions are missing from the features: 'COCO_val2014"
    ):
        load_splits(DataConfig("vqa2"), tmp_path)


def drop_annotation(asked, answered):
    answered.pop()


def swap_image(asked, answered):
    answered[0]["image_id"] += 1


def forget_answers(asked, answered):
    answered[0]["answers"] = []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_annotation, "must have the same question ids, but differ in 1"),
        (swap_image, "has image 25 but annotation 26"),
        (forget_answers, "must have at least one answer, got none"),
        (lambda asked, answered: asked[0].pop("question"), "is not in VQA-v2's format"),
    ],
)
def test_vqa2_questions_and_annotations_that_disagree_are_refused(change, message, tmp_path):
    write_vqa2(tmp_path / "vqa2", change=change)
    with pytest.raises(ValueError, match=message):
        vqa2.read_questions(tmp_path / "vqa2")


@pytest.mark.parametrize("dataset", ["daquar", "vqa2"])
def test_data_sets_with_files_say_what_is_missing(dataset, tmp_path):
    with pytest.raises(ValueError, match=f"{dataset} needs data, the folder that holds {dataset}/"):
        load_splits(DataConfig(dataset), None)
    with pytest.raises(ValueError, match="cannot be read"):
        load_splits(DataConfig(dataset), tmp_path)


def test_training_questions_without_a_known_answer_are_skipped_and_counted():
    config = VQAConfig(data=DataConfig("shapes", train_images=40, answer_min_count=12), model=load_config("shapes-wc").model)
    experiment = VQAExperiment(config, None)
    known = set(experiment.vocabulary.answers)
    assert experiment.num_skipped > 0
    assert experiment.num_examples + experiment.num_skipped == 160
    assert all(known & set(question.answers) for question in experiment.train_split.questions)
    experiment.validation = None
    assert experiment.validate(experiment.model) == {"skipped_questions": experiment.num_skipped}


def test_answers_are_counted_once_a_question():
    questions = [Question("a", "q", ("x",) * 9 + ("y",), "k"), Question("a", "q", ("z",) * 10, "k")]
    assert set(build_vocabulary(questions, DataConfig()).answers) == {"x", "z"}
