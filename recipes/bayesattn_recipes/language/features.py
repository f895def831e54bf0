"""Texts as token ids, and token ids as batches; the same for training, evaluation and serving."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# label fields; everything else of a row is padded to the longest of its batch
SCALARS = ("labels", "start_positions", "end_positions")


@dataclass(frozen=True)
class Encoded:
    """Tokenized texts.

    Attributes:
        rows: Token ids (and types, if the encoder has them) of every text.
        truncated: Which texts were longer than allowed and lost their end.
    """

    rows: list[dict[str, Any]]
    truncated: list[bool]

    @property
    def num_truncated(self) -> int:
        """How many texts lost their end."""
        return sum(self.truncated)


def encode(tokenizer: Any, texts: Sequence[tuple[str, ...]], max_length: int) -> Encoded:
    """Tokenize texts or pairs; beyond `max_length` tokens, the longer text of a pair is cut first."""
    if not texts:
        return Encoded([], [])
    columns = [list(column) for column in zip(*texts, strict=True)]
    full = tokenizer(*columns, verbose=False)
    cut = [len(ids) > max_length for ids in full["input_ids"]]
    names = [name for name in ("input_ids", "token_type_ids") if name in full]
    rows = [{name: full[name][i] for name in names} for i in range(len(texts))]
    long = [i for i, is_cut in enumerate(cut) if is_cut]
    if long:
        short = tokenizer(*([column[i] for i in long] for column in columns), truncation=True, max_length=max_length)
        for place, i in enumerate(long):
            rows[i] = {name: short[name][place] for name in names}
    return Encoded(rows, cut)


@dataclass(frozen=True)
class Collator:
    """Makes a batch of rows.

    Attributes:
        pad_id: The tokenizer's padding token.
        multiple: Lengths are rounded up to a multiple of this, for few distinct shapes that suit tensor cores.
        max_length: Largest length after rounding.
    """

    pad_id: int
    multiple: int = 8
    max_length: int = 512

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return padded ids, types and mask, and the labels if the rows have them."""
        longest = max(len(row["input_ids"]) for row in rows)
        length = max(min(-(-longest // self.multiple) * self.multiple, self.max_length), longest)
        batch = {
            name: torch.tensor([row[name] + [fill] * (length - len(row[name])) for row in rows])
            for name, fill in (("input_ids", self.pad_id), ("token_type_ids", 0))
            if name in rows[0]
        }
        batch["attention_mask"] = torch.tensor(
            [[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows]
        )
        return batch | {name: torch.tensor([row[name] for row in rows]) for name in SCALARS if name in rows[0]}


def bucketed(rows: Sequence[dict[str, Any]], batch_size: int) -> Iterator[list[int]]:
    """Yield the indices of batches of similar length, the longest first, so that a lack of memory shows at once."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]["input_ids"]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]
