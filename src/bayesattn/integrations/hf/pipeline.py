"""transformers' text-classification pipeline, with the doubt of each answer beside its score."""

from typing import Any

import torch
from torch import Tensor

from bayesattn.doubt import uncertainty
from bayesattn.optional import needs_extra
from bayesattn.prediction import find_logits

with needs_extra("bayesattn.integrations.hf", "hf"):
    from transformers import TextClassificationPipeline


class DoubtPipeline(TextClassificationPipeline):
    """The pipeline `text-classification`; each answer also has its doubt, by `ba.uncertainty`.

        from transformers import pipeline
        classify = pipeline("text-classification", model=model, tokenizer=tokenizer, pipeline_class=DoubtPipeline)
        classify("A film to remember.")
        # [{'label': 'positive', 'score': 0.98, 'doubt': -9.1, 't': 9.1, 'margin': 3.9, 'std': 0.43}]

    `label` and `score` are those of the stock pipeline. `margin` is the difference of the two largest logits, `std` its
    standard deviation under attention noise, `t` = margin / std, and `doubt` = −t is for sorting: higher is less certain.
    With `top_k`, the most probable label has them. The model may be plain or Bayesian.

    Raises:
        ValueError: The model is a regression or has several labels per text, so there is no margin.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast, pipeline
        >>> words = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1, "a": 2, "good": 3, "film": 4}, unk_token="[UNK]"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 5}
        >>> model = BertForSequenceClassification(BertConfig(**sizes)).eval()
        >>> options = {"tokenizer": tokenizer, "pipeline_class": DoubtPipeline, "device": "cpu"}
        >>> list(pipeline("text-classification", model=model, **options)("a good film")[0])
        ['label', 'score', 'doubt', 't', 'margin', 'std']
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        config: Any = self.model.config
        if config.num_labels < 2 or config.problem_type in ("regression", "multi_label_classification"):
            raise ValueError(
                f"the model has num_labels={config.num_labels} and problem_type={config.problem_type!r}; a margin needs one "
                "label per text, out of two or more. Use the stock pipeline, or ba.uncertainty with another target"
            )

    def _forward(self, model_inputs: Any) -> dict[str, Tensor]:
        logits: list[Tensor] = []

        def output(outputs: Any) -> Tensor:
            logits.append(find_logits(outputs))
            return logits[-1]

        result = uncertainty(self.model, dict(model_inputs), output=output)
        # the first call is with the outputs of the model as it is
        numbers = {"doubt": result.score, "t": result.t, "margin": result.margin, "std": result.std}
        return {"logits": logits[0].detach(), **{name: value.detach() for name, value in numbers.items()}}

    def postprocess(self, model_outputs: Any, **parameters: Any) -> Any:
        """Return the stock pipeline's answer, with doubt added to the most probable label."""
        doubt = {name: float(value[0]) for name, value in model_outputs.items() if name != "logits"}
        found = super().postprocess(model_outputs, **parameters)
        if isinstance(found, dict):
            return {**found, **doubt}
        config: Any = self.model.config
        label = config.id2label[int(torch.argmax(model_outputs["logits"][0]))]
        return [{**entry, **doubt} if entry["label"] == label else entry for entry in found]
