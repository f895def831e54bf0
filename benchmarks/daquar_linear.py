"""What DAQUAR's questions give away without attention: softmax regression on their words and on the mean of the image.

    python benchmarks/daquar_linear.py DIR docs/results/vqa-daquar-linear.csv

Features are the words of a question, their pairs and triples, and the mean over the image's regions. Ten folds of the
training images, each trained on the other nine; then all training questions, and the test questions. DIR is the folder that
holds `daquar`. A minute on one core.
"""

import csv
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesattn_recipes.vision.annotations import Question
from bayesattn_recipes.vqa.data import DataConfig, Split, load_splits
from bayesattn_recipes.vqa.vocabulary import tokenize

NUM_FOLDS, EPOCHS, BATCH, LEARNING_RATE = 10, 12, 256, 0.01
# of a question; the longest has fewer than this many pieces that occur twice
MOST_PIECES = 60


def pieces(text: str) -> list[str]:
    """Return the words of a question behind a start, their pairs and triples, each once."""
    words = ["<s>", *tokenize(text)]
    runs = (zip(*(words[i:] for i in range(length)), strict=False) for length in (1, 2, 3))
    return list(dict.fromkeys(" ".join(run) for found in runs for run in found))


def bags(questions: Sequence[Question], known: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Return the numbers of the pieces of every question, 0 where there are fewer, and weights of length 1."""
    numbers = torch.zeros(len(questions), MOST_PIECES, dtype=torch.long)
    for row, question in enumerate(questions):
        found = [known[piece] for piece in pieces(question.text) if piece in known][:MOST_PIECES]
        numbers[row, : len(found)] = torch.tensor(found, dtype=torch.long)
    used = (numbers > 0).float()
    return numbers, used / used.sum(1, keepdim=True).clamp(min=1.0).sqrt()


def images(split: Split, mean: Tensor) -> Tensor:
    """Return the mean region of every question's image, centred, of length 1."""
    rows, place = split.places.unique(return_inverse=True)
    regions, mask = split.regions.gather(rows)
    means = (regions * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return F.normalize(means - mean, dim=1)[place]


def evaluate(train: tuple[list[Question], Tensor], test: tuple[list[Question], Tensor]) -> tuple[float, float]:
    """Train on some questions and return the percentage of others that are right, of all and of those with one answer."""
    counts = Counter(piece for question in train[0] for piece in pieces(question.text))
    known = {piece: number for number, piece in enumerate((piece for piece, n in counts.items() if n > 1), start=1)}
    answers = {answer: i for i, answer in enumerate(sorted({question.answers[0] for question in train[0]}))}
    torch.manual_seed(0)
    words, image = nn.EmbeddingBag(len(known) + 1, len(answers), mode="sum"), nn.Linear(train[1].shape[1], len(answers))
    nn.init.zeros_(words.weight)
    nn.init.zeros_(image.weight)
    optimizer = torch.optim.Adam([*words.parameters(), *image.parameters()], LEARNING_RATE)
    (numbers, weights), right = bags(train[0], known), torch.tensor([answers[question.answers[0]] for question in train[0]])
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(right)).split(BATCH):
            logits = words(numbers[rows], per_sample_weights=weights[rows]) + image(train[1][rows])
            optimizer.zero_grad()
            F.cross_entropy(logits, right[rows]).backward()
            optimizer.step()
    numbers, weights = bags(test[0], known)
    with torch.no_grad():
        found = (words(numbers, per_sample_weights=weights) + image(test[1])).argmax(1)
    is_right = found == torch.tensor([answers.get(question.answers[0], -1) for question in test[0]])
    is_single = torch.tensor(["," not in question.answers[0] for question in test[0]])
    return 100.0 * float(is_right.float().mean()), 100.0 * float(is_right[is_single].float().mean())


def main(data: Path, path: Path) -> None:
    """Measure and write."""
    splits = load_splits(DataConfig(dataset="daquar", validation_share=0.0), data)
    train, test = splits["train"], splits["test"]
    seen = train.regions.gather(train.places.unique())[0].mean((0, 1))
    inputs, targets = images(train, seen), images(test, seen)
    names = sorted({question.image for question in train.questions})
    random.Random(20200).shuffle(names)
    fold_of = {name: i % NUM_FOLDS for i, name in enumerate(names)}
    rows = []
    for fold in range(NUM_FOLDS):
        parts = []
        for is_held_out in (False, True):
            places = [i for i, q in enumerate(train.questions) if (fold_of[q.image] == fold) == is_held_out]
            parts.append(([train.questions[i] for i in places], inputs[places]))
        rows.append([f"fold {fold}", len(parts[1][0]), *evaluate(*parts)])
    rows.append(["test", len(test.questions), *evaluate((train.questions, inputs), (test.questions, targets))])
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["questions", "number", "accuracy", "accuracy_single"])
        writer.writerows([*row[:2], *(f"{value:.2f}" for value in row[2:])] for row in rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
