"""The callback line of the guide, copied onto a pretrained encoder, leaves it what it can do."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import bayesattn as ba
from bayesattn.integrations.hf import KLCallback
from bayesattn_recipes.language import data as language_data
from bayesattn_recipes.language import model as encoders
from data import shared_data

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "training.md"


def rows(examples: list, tokenizer: Any, *, longest: int, every: int, count: int) -> list[dict[str, Any]]:
    """Return `count` of the examples that have at least five words and at most `longest`, encoded."""
    kept = [example for example in examples if 5 <= len(example.texts[0].split()) <= longest][::every][:count]
    encoded = tokenizer([example.texts[0] for example in kept], truncation=True, max_length=32)
    names = ("input_ids", "attention_mask")
    return [{**{n: encoded[n][i] for n in names}, "labels": int(kept[i].label)} for i in range(len(kept))]


@pytest.mark.slow
@pytest.mark.skipif(shared_data() is None, reason="the shared data folder is not there")
def test_the_line_of_the_guide_stays_within_two_points_of_soft(tmp_path):
    line = re.search(r"^callbacks = .*KLCallback.*$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    assert line is not None
    copied: dict[str, Any] = {"ba": ba, "KLCallback": KLCallback}
    exec(line[0], copied)

    where = encoders.find_encoder("e5-small", shared_data())
    tokenizer = encoders.load_tokenizer(where, list)
    splits = language_data.load("sst2", shared_data()).splits
    # one of 31: in the file the phrases of one sentence stand together
    train = rows(splits["train"], tokenizer, longest=12, every=31, count=400)
    test = rows(splits["test"], tokenizer, longest=20, every=1, count=320)

    def accuracy(callbacks: list[hf.TrainerCallback]) -> float:
        hf.set_seed(0)
        # without dropout the two runs differ in the noise and the KL alone
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = hf.AutoConfig.from_pretrained(where, num_labels=2, dtype=torch.float32, **rates)
        model = hf.AutoModelForSequenceClassification.from_config(config)
        weights = encoders.packed_weights(Path(where) / "model.safetensors.xz")
        encoders.load_encoder(model, weights, where)
        # every second layer keeps most of what the twelve know, in half the time
        model.base_model.encoder.layer = model.base_model.encoder.layer[1::2]
        model.base_model.embeddings.requires_grad_(False)
        if callbacks:
            ba.bayesianize(model, ba.AttentionConfig("BAM-WC"))
        arguments = hf.TrainingArguments(
            str(tmp_path), num_train_epochs=2, per_device_train_batch_size=16, learning_rate=1e-4, save_strategy="no",
            report_to="none", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, seed=0,
        )  # fmt: skip
        collator = hf.DataCollatorWithPadding(tokenizer)
        trainer = hf.Trainer(model, arguments, train_dataset=train, data_collator=collator, callbacks=callbacks)
        trainer.train()
        found = trainer.predict(test)
        return float((found.predictions.argmax(axis=-1) == found.label_ids).mean())

    soft = accuracy([])
    # far from the majority class, so that there is something to lose
    assert soft > 0.7
    assert accuracy(copied["callbacks"]) > soft - 0.02
