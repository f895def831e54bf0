"""docs/reference/supported-models.md says what the tests prove and what the code does."""

import pytest
import supported_models
import transformers as hf
from registry import MODEL_TYPES
from zoo import ARCHITECTURES

PROMISED = (
    "albert bert roberta distilbert electra modernbert deberta_v2 mpnet vit dinov2 clip swin gpt2 opt llama mistral qwen3 "
    "gemma2 gptj bloom falcon t5 bart whisper wav2vec2 patchtst"
)
# of every way to convert, of every reason to refuse
TRIED = (
    "bert", "llama", "t5", "siglip_vision_model", "mpnet", "deberta-v2", "falcon", "bloom", "gptj",
    "gpt_oss", "xlnet", "longformer", "mamba", "encoder-decoder",
)  # fmt: skip
PAGE = supported_models.PAGE.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _quiet():
    hf.logging.set_verbosity_error()
    yield
    hf.logging.set_verbosity_warning()


def test_the_page_shows_what_the_suite_runs():
    assert supported_models.replace(PAGE, "support matrix", supported_models.matrix()) == PAGE


def test_nothing_promised_is_missing_from_the_suite():
    assert set(PROMISED.split()) == {name.split(",")[0] for name in ARCHITECTURES}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", TRIED)
def test_the_page_says_what_the_code_does(model_type):
    assert supported_models.lines_of(PAGE)[model_type] == supported_models.row(model_type)


def test_the_tried_types_are_of_every_group():
    groups = {supported_models.lines_of(PAGE)[model_type][0] for model_type in TRIED}
    assert groups == {"converts", "refused", "not tried"}


def test_what_works_in_part_is_known():
    """A failed check of any other type would be a defect of ours; this one runs most of its layers under no_grad."""
    assert [name for name, (group, _) in supported_models.lines_of(PAGE).items() if group == "in part"] == ["hrm_text"]


@pytest.mark.skipif(f"transformers {hf.__version__}" not in PAGE, reason="the page is of another version of transformers")
def test_every_type_of_the_registry_is_on_the_page():
    assert sorted(supported_models.lines_of(PAGE)) == MODEL_TYPES


def test_a_conversion_that_is_not_exact_does_not_pass(monkeypatch):
    from bayesattn.integrations.hf import attention

    model = supported_models.registry.build("bert", "sdpa")
    arguments = attention._score_arguments
    monkeypatch.setattr(attention, "_score_arguments", lambda *a: {**arguments(*a), "scale": 0.1})
    with pytest.raises(AssertionError, match="a draw without noise is not the mean"):
        supported_models.check(model, supported_models.registry.inputs(model))
