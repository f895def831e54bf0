"""A trained attention model as a scikit-learn classifier whose answers have an uncertainty.

It works wherever a scikit-learn classifier does: metrics, calibration, cross-validation, conformal prediction. The model is
already trained and does not change, so `fit` only checks the labels.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesattn.doubt import uncertainty
from bayesattn.doubt.targets import require_exclusive_classes
from bayesattn.doubt.texts import check_texts, token_limit
from bayesattn.modes import evaluating
from bayesattn.optional import needs_extra
from bayesattn.precision import upcast
from bayesattn.prediction import as_arguments, find_logits
from bayesattn.scalars import check_count

with needs_extra("bayesattn.integrations.sklearn", "sklearn"):
    from sklearn.base import BaseEstimator, ClassifierMixin


class DoubtClassifier(ClassifierMixin, BaseEstimator):
    """A torch or transformers classifier with scikit-learn's methods and `predict_uncertainty`.

    Clones share the model: cross-validation measures one trained model on every fold, without copies.

    Args:
        model: A trained classifier, plain or with Bayesian attention: everything `ba.uncertainty` takes.
        tokenizer: Its tokenizer; X is then a sequence of texts or of pairs of texts. Without one, X is an array or a tensor,
            examples first, and the model's only argument.
        classes: The labels of the model's outputs, in their order; None is 0, 1, 2, ...
        batch_size: Examples per pass.
        max_length: Maximum number of tokens; None is what tokenizer and model allow.
        device: Where to run; the model is moved there. None leaves it where it is.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = nn.Sequential(layer, nn.Flatten(), nn.Linear(5 * 8, 3))
        >>> classifier = DoubtClassifier(model, classes=["cat", "dog", "bird"])
        >>> X = np.random.default_rng(0).normal(size=(6, 5, 8))
        >>> classifier.classes_.tolist(), classifier.predict_proba(X).shape, classifier.predict_uncertainty(X).shape
        (['bird', 'cat', 'dog'], (6, 3), (6,))
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Callable[..., Any] | None = None,
        *,
        classes: Sequence[Any] | None = None,
        batch_size: int = 32,
        max_length: int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.classes = classes
        self.batch_size = batch_size
        self.max_length = max_length
        self.device = device

    @property
    def classes_(self) -> np.ndarray:
        """The labels, sorted as scikit-learn requires; columns of `predict_proba` are in this order."""
        return np.unique(self._outputs())

    def fit(self, X: Any, y: Any) -> "DoubtClassifier":
        """Check that the model has all labels in `y`; nothing is trained.

        Raises:
            ValueError: A label is not among the classes.
        """
        if not hasattr(self, "classes_"):
            self._logits(X[:1])
        strange = sorted(set(np.unique(y).tolist()) - set(self.classes_.tolist()), key=str)
        if strange:
            raise ValueError(
                f"y has the labels {strange[:8]}, but the model has {self.classes_.tolist()[:8]}. Give classes= the labels "
                "of the model's outputs, in their order"
            )
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probabilities of the model as it is, one column for each of `classes_`."""
        logits = self._logits(X)
        order = np.argsort(self._outputs(), kind="stable")
        return torch.softmax(upcast(logits), dim=1).cpu().numpy()[:, order]

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each example."""
        best = self._logits(X).argmax(dim=1).cpu().numpy()
        return self._outputs()[best]

    def predict_uncertainty(self, X: Any) -> np.ndarray:
        """Return `ba.uncertainty(...).score` of each example: −t of its margin, higher is less certain."""
        found = [uncertainty(self.model, batch).score.double().cpu() for batch in self._batches(X)]
        return torch.cat(found).numpy() if found else np.zeros(0)

    def _logits(self, X: Any) -> Tensor:
        require_exclusive_classes(self.model)
        found = []
        for batch in self._batches(X):
            args, kwargs = as_arguments(batch)
            with torch.no_grad(), evaluating(self.model):
                found.append(find_logits(self.model(*args, **kwargs)))
        if not found:
            raise ValueError("X must hold at least one example, got none")
        logits = torch.cat(found)
        if logits.ndim != 2 or logits.shape[1] < 2:
            raise ValueError(f"the model's outputs must have shape (examples, classes), got {tuple(logits.shape)}")
        self._num_outputs = logits.shape[1]
        if len(self._outputs()) != logits.shape[1]:
            raise ValueError(
                f"classes must have {logits.shape[1]} labels, one per output of the model, got {len(self._outputs())}"
            )
        return logits

    def _outputs(self) -> np.ndarray:
        """Return the label of every output of the model."""
        if self.classes is not None:
            labels = np.asarray(self.classes)
            if labels.ndim != 1 or len(np.unique(labels)) != len(labels):
                raise ValueError(f"classes must be different labels, one per output of the model, got {self.classes!r}")
            return labels
        number = getattr(getattr(self.model, "config", None), "num_labels", None) or getattr(self, "_num_outputs", None)
        if number is None:
            raise AttributeError("classes_ is not available before the model has run. Give classes=, or call fit(X, y)")
        return np.arange(number)

    def _batches(self, X: Any) -> Iterator[Any]:
        check_count("batch_size", self.batch_size)
        check_texts("X", X)
        if self.device is not None:
            self.model.to(self.device)
        parameter = next(self.model.parameters())
        for start in range(0, len(X), self.batch_size):
            part = X[start : start + self.batch_size]
            if self.tokenizer is not None:
                yield {name: value.to(parameter.device) for name, value in self._encode(part).items()}
                continue
            values = part if isinstance(part, Tensor) else torch.from_numpy(np.ascontiguousarray(part))
            yield values.to(parameter.device, parameter.dtype if values.is_floating_point() else None)

    def _encode(self, texts: Any) -> Any:
        rows = [text if isinstance(text, str) else tuple(text) for text in texts]
        pairs = [row for row in rows if not isinstance(row, str)]
        if not all(isinstance(text, str) for pair in pairs for text in pair) or len(pairs) not in (0, len(rows)):
            raise ValueError("X must be texts or pairs of texts, not both, because a tokenizer is given")
        tokenizer: Any = self.tokenizer
        limit = token_limit(self.model, tokenizer) if self.max_length is None else self.max_length
        columns = [[row[0] for row in pairs], [row[1] for row in pairs]] if pairs else [rows]
        return tokenizer(*columns, padding=True, truncation=True, max_length=limit, return_tensors="pt")

    def __sklearn_clone__(self) -> "DoubtClassifier":
        return type(self)(**self.get_params(deep=False))

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "classes_")
