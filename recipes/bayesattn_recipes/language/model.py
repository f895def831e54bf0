"""From an encoder to a model: its config, its pretrained weights, a fresh head, its tokenizer, and Bayesian attention.

An encoder is named by `e5-small` (the folder `encoder_e5_small_hf` of the data, weights plain or as `.xz`), by a folder in
Hugging Face's format, by a name on the hub (`albert-base-v2`), or is `tiny`: a random two-layer BERT whose vocabulary is
made from the training texts, for tests and first steps. Code that comes with an encoder is never run, and weights are
read from safetensors only.
"""

import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from bayesattn.config import AttentionConfig
from bayesattn.convert import bayesianize
from bayesattn.files import write_bytes
from bayesattn_recipes.baselines import attention_options
from bayesattn_recipes.common.sources import SOURCES
from bayesattn_recipes.language.files import unpack
from bayesattn_recipes.language.tasks import Kind

E5_FOLDER = "encoder_e5_small_hf"
WEIGHTS = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "vocab.json")
# a folder named here keeps decompressed weights between processes; without it they are decompressed into memory
CACHE_VARIABLE = "BAYESATTN_CACHE"

TINY: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 512,
}  # fmt: skip
TINY_WORDS = 2000
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

# the names that architectures give the three rates
_DROPOUTS = {
    "dropout": ("hidden_dropout_prob", "dropout", "hidden_dropout", "mlp_dropout"),
    "attention_dropout": ("attention_probs_dropout_prob", "attention_dropout"),
    "classifier_dropout": ("classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout"),
}


def find_encoder(encoder: str, data: Path | None) -> str:
    """Return the place of an encoder: `tiny`, the path of a folder, or a name for the hub."""
    if encoder == "tiny":
        return encoder
    if encoder == "e5-small":
        if data is None or not (data / E5_FOLDER).is_dir():
            raise ValueError(
                f"encoder 'e5-small' needs the folder {E5_FOLDER}, which is not in the data folder {str(data)!r}. Give a "
                f"data folder that has it, the path of another encoder's folder, or a name on the hub. {SOURCES['e5-small']}"
            )
        return str(data / E5_FOLDER)
    if encoder.startswith((".", "/", "~")) and not Path(encoder).expanduser().is_dir():
        raise ValueError(
            f"encoder must be tiny, e5-small, a folder, or a name on the hub, got {encoder!r}, which is not a folder"
        )
    return str(Path(encoder).expanduser()) if Path(encoder).expanduser().is_dir() else encoder


def load_tokenizer(where: str, texts: Callable[[], Iterable[str]]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of an encoder; for `tiny` it is made from `texts`."""
    if where == "tiny":
        return tiny_tokenizer(texts())
    folder = Path(where)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{where} has no tokenizer. Give a folder with one of {', '.join(TOKENIZER_FILES)}")
    try:
        return AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except Exception as error:
        # transformers raises many kinds of errors here: a broken file, a missing package, no connection
        reason = " ".join(str(error).split())
        raise ValueError(f"the tokenizer of {where!r} cannot be loaded: {reason}") from error


def tiny_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """Make an uncased WordPiece tokenizer: the most frequent words of the texts, and single characters for the others."""
    words: Counter[str] = Counter()
    for text in texts:
        words.update(re.findall(r"\w+|[^\w\s]", text.lower()))
    characters = sorted({character for word in words for character in word})
    common = [word for word, _ in words.most_common(TINY_WORDS) if len(word) > 1]
    tokens = [*SPECIAL_TOKENS, *characters, *(f"##{character}" for character in characters), *common]
    return BertTokenizer(vocab={token: index for index, token in enumerate(tokens)}, do_lower_case=True)


def encoder_config(where: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Read the config of an encoder."""
    if where == "tiny":
        return BertConfig(vocab_size=len(tokenizer), pad_token_id=SPECIAL_TOKENS.index("[PAD]"), **TINY)
    try:
        return AutoConfig.from_pretrained(where, trust_remote_code=False)
    except Exception as error:
        # as above: a config of the wrong type or size may raise yet another kind
        reason = " ".join(str(error).split())
        raise ValueError(f"the config of encoder {where!r} cannot be loaded: {reason}") from error


def set_up(config: PreTrainedConfig, kind: Kind, num_outputs: int, rates: dict[str, float | None]) -> PreTrainedConfig:
    """Set the head and the dropout rates of a config, in place; a rate of None stays as it is."""
    config.num_labels = 2 if kind == "spans" else num_outputs
    if kind != "spans":
        config.problem_type = "regression" if kind == "regression" else "single_label_classification"
    for name, rate in rates.items():
        if rate is None:
            continue
        found = [attribute for attribute in _DROPOUTS[name] if hasattr(config, attribute)]
        if not found:
            raise ValueError(f"{name} must be null, because a {config.model_type} encoder has no such rate, got {rate!r}")
        setattr(config, found[0], rate)
    # runs are fp32 whatever the type in the file; autocast decides what is computed in bf16
    config.dtype = torch.float32
    return config


def build_model(config: PreTrainedConfig, kind: Kind, attention: AttentionConfig) -> PreTrainedModel:
    """Build a model with fresh parameters; its attention is converted, also for `soft`, whose dropout can be sampled."""
    return bayesianize(_auto_class(kind).from_config(config), **attention_options(attention))


def load_pretrained(where: str, config: PreTrainedConfig, kind: Kind, attention: AttentionConfig) -> PreTrainedModel:
    """Build a model with the encoder's weights and a fresh head."""
    if where == "tiny":
        return build_model(config, kind, attention)
    packed = find_packed(where)
    if packed is not None:
        model = _auto_class(kind).from_config(config)
        load_encoder(model, packed_weights(packed), where)
        return bayesianize(model, **attention_options(attention))
    try:
        # load neither pickled weights nor code that comes with them
        options = {"use_safetensors": True, "trust_remote_code": False}
        model = _auto_class(kind).from_pretrained(where, config=config, dtype=torch.float32, **options)
    except OSError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the weights of encoder {where!r} cannot be loaded: {reason}") from None
    return bayesianize(model, **attention_options(attention))


def load_encoder(model: PreTrainedModel, weights: dict[str, Tensor], where: str) -> None:
    """Copy an encoder's weights into a model, casting them to the model's type; its head stays fresh."""
    encoder = model.base_model
    own = encoder.state_dict()
    missing = sorted(own.keys() - weights.keys())
    wrong = sorted(name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape)
    if missing or wrong:
        raise ValueError(
            f"the weights in {where} do not match their config: {missing[:4]} missing, {wrong[:4]} of another size"
        )
    encoder.load_state_dict({name: weights[name] for name in own})


def find_packed(where: str) -> Path | None:
    """Return the compressed weights of an encoder whose folder has no others; None if there is nothing to decompress."""
    folder = Path(where)
    is_packed = folder.is_dir() and not (folder / WEIGHTS).is_file() and (folder / f"{WEIGHTS}.xz").is_file()
    return folder / f"{WEIGHTS}.xz" if is_packed else None


def packed_weights(path: Path) -> dict[str, Tensor]:
    """Decompress weights: into the folder that BAYESATTN_CACHE names, once, or into memory, once per process."""
    cache = os.environ.get(CACHE_VARIABLE)
    return _read_packed(path, path.stat().st_mtime_ns, Path(cache) if cache else None)


@lru_cache(maxsize=1)
def _read_packed(path: Path, modified: int, cache: Path | None) -> dict[str, Tensor]:
    if cache is None:
        return safetensors.torch.load(unpack(path))
    plain = cache / f"{path.parent.name}-{modified}-{WEIGHTS}"
    if not plain.is_file():
        write_bytes(plain, unpack(path))
    return safetensors.torch.load_file(plain)


def _auto_class(kind: Kind) -> Any:
    return AutoModelForQuestionAnswering if kind == "spans" else AutoModelForSequenceClassification


@contextmanager
def unpacked(encoder: str) -> Iterator[None]:
    """Decompress a packed encoder once for all processes that are started in this scope; other encoders need nothing.

    Args:
        encoder: From `find_encoder`.
    """
    packed = find_packed(encoder)
    if packed is None or os.environ.get(CACHE_VARIABLE):
        if packed is not None:
            packed_weights(packed)
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE_VARIABLE] = folder
        try:
            packed_weights(packed)
            yield
        finally:
            del os.environ[CACHE_VARIABLE]
