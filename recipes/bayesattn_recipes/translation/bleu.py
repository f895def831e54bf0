"""Corpus and sentence scores by sacrebleu, with the signature of how they were computed."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

Kind = Literal["cased", "lowercase", "tokenized"]


class CorpusScore(NamedTuple):
    """A score and its sacrebleu signature."""

    score: float
    signature: str


class Counts(NamedTuple):
    """The counts of a sentence that BLEU needs: n-grams found in the reference, n-grams, and both lengths. They add up."""

    correct: tuple[int, ...]
    total: tuple[int, ...]
    output_length: int
    reference_length: int


def corpus_bleu(outputs: Sequence[str], references: Sequence[str], kind: Kind = "cased") -> CorpusScore:
    """Return BLEU of a corpus.

    Args:
        outputs: Translations.
        references: One per translation.
        kind: `cased` or `lowercase` text, tokenized by sacrebleu's rules (13a); or `tokenized` text, lower-cased and taken
            as it is (IWSLT14's files, and the paper's kind of BLEU).
    """
    options = {"tokenize": "none", "force": True} if kind == "tokenized" else {}
    metric = BLEU(lowercase=kind != "cased", **options)
    score = metric.corpus_score(list(outputs), [list(references)])
    return CorpusScore(score.score, str(metric.get_signature()))


def corpus_chrf(outputs: Sequence[str], references: Sequence[str]) -> CorpusScore:
    """Return chrF2."""
    metric = CHRF()
    score = metric.corpus_score(list(outputs), [list(references)])
    return CorpusScore(score.score, str(metric.get_signature()))


def sentence_scores(outputs: Sequence[str], references: Sequence[str]) -> dict[str, list[float]]:
    """Return `chrf` and `bleu` of every sentence, from 0 to 100; BLEU counts only the orders a sentence has."""
    chrf, bleu = CHRF(), BLEU(effective_order=True)
    pairs = list(zip(outputs, references, strict=True))
    return {
        "chrf": [chrf.sentence_score(output, [reference]).score for output, reference in pairs],
        "bleu": [bleu.sentence_score(output, [reference]).score for output, reference in pairs],
    }


def sentence_counts(outputs: Sequence[str], references: Sequence[str]) -> list[Counts]:
    """Return the counts of every sentence (cased), so that BLEU of many subsets can be computed without the text."""
    metric = BLEU(effective_order=True)
    scores = [metric.sentence_score(output, [reference]) for output, reference in zip(outputs, references, strict=True)]
    return [Counts(tuple(score.counts), tuple(score.totals), score.sys_len, score.ref_len) for score in scores]


def bleu_of_counts(counts: Sequence[Counts]) -> float:
    """Return corpus BLEU from the counts of sentences, the same as `corpus_bleu` of their text."""
    correct = [sum(column) for column in zip(*(c.correct for c in counts), strict=True)]
    total = [sum(column) for column in zip(*(c.total for c in counts), strict=True)]
    lengths = sum(c.output_length for c in counts), sum(c.reference_length for c in counts)
    return float(BLEU.compute_bleu(correct, total, *lengths, smooth_method="exp").score)


def bootstrap_p_value(
    baseline: Sequence[str], ours: Sequence[str], references: Sequence[str], *, num_resamples: int = 1000
) -> float:
    """Return the p-value of a paired bootstrap test that two systems have the same BLEU (Koehn, 2004).

    It is sacrebleu's: the share of resamples whose absolute difference exceeds its own mean by the observed one. So it
    counts one side, and is somewhat below one half if there is no difference.
    """
    if list(baseline) == list(ours):
        # sacrebleu counts differences above the observed one and would find none above 0, which gives the smallest p
        return 1.0
    systems: list[tuple[str, Sequence[str]]] = [("baseline", list(baseline)), ("ours", list(ours))]
    test = PairedTest(systems, {"BLEU": BLEU()}, [list(references)], test_type="bs", n_samples=num_resamples)
    results: Any = test()[1]
    return float(results["BLEU"][1].p_value)
