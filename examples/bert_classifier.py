"""A Bayesian BERT classifier with the stock Trainer, from conversion to a prediction that knows when it is unsure.

    python examples/bert_classifier.py

A tiny random BERT and made-up data stand in for yours: swap in `AutoModelForSequenceClassification.from_pretrained(...)`
and your data set, the rest stays. The task: is the word 7 in the sentence? Where the word 6 is, nobody can know.
"""

import argparse
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import bayesattn as ba
from bayesattn.convert import bayesianize, conversion_report, load_bayesian, save_bayesian
from bayesattn.integrations.hf import KLCallback


def make_data(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return sentences of 12 words and labels; those with a 6 in front, one of five, are tossed like a coin."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(8, 40, (count, 12), generator=generator)
    labels = torch.randint(0, 2, (count,), generator=generator)
    place = torch.randint(0, 12, (count,), generator=generator)
    ids[torch.arange(count), place] = torch.where(labels == 1, 7, ids[torch.arange(count), place])
    coin = torch.rand(count, generator=generator) < 0.2
    ids[:, 0] = torch.where(coin, 6, ids[:, 0])
    labels = torch.where(coin, torch.randint(0, 2, (count,), generator=generator), labels)
    return [{"input_ids": ids[i], "labels": labels[i]} for i in range(count)]


def main(steps: int) -> float:
    """Train, save, reload and predict; return the accuracy."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    model = bayesianize(BertForSequenceClassification(config), ba.AttentionConfig("BAM-WC"))
    print(conversion_report(model))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=32, learning_rate=2e-3, logging_steps=max(steps // 3, 1),
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
        )  # fmt: skip
        # the one line that turns the Trainer's loss into the negative ELBO; the KL is at most 0.01 of the NLL, which keeps a
        # pretrained model from forgetting what it knows (max_share=None for the paper's objective)
        callbacks = [KLCallback(ba.KLSchedule("sigmoid", anneal_rate=0.05))]
        Trainer(model, arguments, train_dataset=make_data(2000, seed=1), callbacks=callbacks).train()
        # only the priors and a JSON file; the plain weights are saved as always
        save_bayesian(model, folder)
        plain = BertForSequenceClassification(config)
        plain.load_state_dict({key: value for key, value in model.state_dict().items() if ".bayes." not in key})
        model = load_bayesian(plain, folder)
    test = make_data(500, seed=2)
    inputs = {"input_ids": torch.stack([row["input_ids"] for row in test])}
    labels = torch.stack([row["labels"] for row in test])
    prediction = ba.predict(model, inputs, num_samples=20, seed=0)
    right = prediction.mean.argmax(dim=-1) == labels
    sure = prediction.entropy <= prediction.entropy.median()
    print(f"accuracy {right.float().mean():.3f}; of the surer half {right[sure].float().mean():.3f}")
    return float(right.float().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
