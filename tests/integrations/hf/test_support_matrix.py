"""The support matrix on the docs page is the one that the tests prove."""

import support_matrix
from zoo import ARCHITECTURES

PROMISED = (
    "albert bert roberta distilbert electra modernbert vit dinov2 clip swin gpt2 opt llama mistral qwen3 gemma2 t5 bart "
    "whisper wav2vec2 patchtst"
)


def test_the_page_shows_what_the_suite_runs():
    page = support_matrix.PAGE.read_text(encoding="utf-8")
    assert page == support_matrix.with_table(page), "run: python tests/integrations/hf/support_matrix.py"


def test_nothing_promised_is_missing_from_the_suite():
    assert set(PROMISED.split()) == set(ARCHITECTURES)
