"""Texts for a classifier with a tokenizer: what every function that takes them checks."""

from typing import Any


def check_texts(name: str, texts: Any) -> None:
    """Raise on a single string, whose characters would each be taken for a text."""
    if isinstance(texts, str):
        shown = repr(texts if len(texts) <= 40 else f"{texts[:40]}…")
        raise ValueError(
            f"{name} must be a list of texts or of pairs of texts, got the string {shown}. For one text give [text]"
        )
