"""A generated language for tests: German words in, the same numbers in English out, last word first."""

import random

from bayesattn_recipes.translation.text import Pairs

WORDS = {
    "eins": "one",
    "zwei": "two",
    "drei": "three",
    "vier": "four",
    "fünf": "five",
    "sechs": "six",
    "sieben": "seven",
    "acht": "eight",
}


def reversed_numbers(count: int, seed: int, longest: int = 5) -> Pairs:
    """Sentences of one to `longest` words and their translations."""
    chooser = random.Random(seed)
    sources = [chooser.choices(list(WORDS), k=chooser.randint(1, longest)) for _ in range(count)]
    targets = [[WORDS[word] for word in reversed(words)] for words in sources]
    return Pairs([" ".join(words) for words in sources], [" ".join(words) for words in targets])


def generated_splits(count: int = 200) -> dict[str, Pairs]:
    return {name: reversed_numbers(size, seed, longest=3) for seed, (name, size) in enumerate(_sizes(count).items())}


def _sizes(count: int) -> dict[str, int]:
    return {"train": count, "validation": 23, "test": 17}
