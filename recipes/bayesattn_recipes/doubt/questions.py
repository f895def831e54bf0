"""Doubt about the answers to SQuAD 2.0: are they right, and does the paragraph answer the question at all?"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import bayesattn as ba
from bayesattn.metrics import auroc
from bayesattn_recipes.doubt.rankings import BASELINE, DEVIATION, FLAGSHIP, NULL_SCORE, Row, ranked
from bayesattn_recipes.language import metrics, spans
from bayesattn_recipes.language import train as language
from bayesattn_recipes.language.features import Collator, bucketed
from bayesattn_recipes.language.prepare import Prepared, Split

BATCH_SIZE = 64


def span_over_null(outputs: Any, first: Int[Tensor, " b"], last: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Return d = start_first + end_last − start_0 − end_0: how far a given span is above "no answer"."""
    start, end = outputs.start_logits.float(), outputs.end_logits.float()
    rows = torch.arange(len(start), device=start.device)
    return start[rows, first] + end[rows, last] - start[:, 0] - end[:, 0]


def of_questions(model: nn.Module, split: Split, collator: Collator) -> list[Row]:
    """Measure a model of SQuAD 2.0; of several windows of a paragraph, the one with the best span answers the question.

    The answer is that span where d > 0, and "no answer" elsewhere.
    """
    device = next(model.parameters()).device
    pieces: list[list[tuple[Any, spans.WindowScores, Tensor, Tensor]]] = [[] for _ in split.questions]
    for indices in bucketed(split.rows, BATCH_SIZE):
        batch = collator([split.rows[i] for i in indices])
        inputs = {name: value.to(device) for name, value in batch.items() if not name.endswith("positions")}
        windows = [split.windows[i] for i in indices]
        with torch.no_grad():
            plain = model(**inputs)
        length = plain.start_logits.shape[1]
        allowed = torch.tensor([[o is not None for o in w.offsets] + [False] * (length - len(w.offsets)) for w in windows])
        start, end = plain.start_logits.unsqueeze(0), plain.end_logits.unsqueeze(0)
        scores = spans.score_windows(start, end, allowed.to(device))
        first, last = torch.stack([found.spans[0] for found in scores]).to(device).unbind(dim=1)
        doubt = ba.uncertainty(model, inputs, target=partial(span_over_null, first=first, last=last))
        value, std = doubt.value.cpu(), doubt.std.cpu()
        for i, (window, found) in enumerate(zip(windows, scores, strict=True)):
            pieces[window.owner].append((window, found, value[i], std[i]))
    found_d, found_std, confidence, correct = [], [], [], []
    for question, of_question in zip(split.questions, pieces, strict=True):
        window, best, d, std = max(of_question, key=lambda piece: float(piece[1].scores[0, 0]))
        begins, ends = (window.offsets[place] for place in best.spans[0].tolist())
        text = question.context[begins[0] : ends[1]] if d > 0 else ""
        answer = spans.answer(question, [(w, s) for w, s, *_ in of_question], allows_none=True)
        found_d.append(float(d))
        found_std.append(float(std))
        confidence.append(float(answer.probabilities[0, :-1].max()))
        correct.append(metrics.exact_match(text, question.golds))
    d, std, confidence, correct = (torch.tensor(x).double() for x in (found_d, found_std, confidence, correct))
    t = d / std
    rows = ranked(correct, {BASELINE: confidence, NULL_SCORE: d.abs(), FLAGSHIP: t.abs()})
    is_open = torch.tensor([not question.answers for question in split.questions])
    for name, speaks_for_none in {BASELINE: 1.0 - confidence, NULL_SCORE: -d, FLAGSHIP: -t, DEVIATION: std}.items():
        value = float(auroc(speaks_for_none[~is_open], speaks_for_none[is_open]))
        rows.append({"row": name, "measure": "AUROC of unanswerable", "value": value})
    return rows


def run(config: language.LanguageConfig, data: Path | None, prepared: Prepared) -> list[Row]:
    """Fine-tune an encoder and measure its answers to the test questions."""
    fitted = language.train_model(config, data, prepared=prepared)
    model = ba.restore(fitted.model).eval()
    return of_questions(model, prepared.splits["test"], language.make_collator(config, prepared.tokenizer))
