"""The run folder of a trained model: files that open anywhere and cannot run code.

    RUN/
      run.json                  recipe, variant, resolved config, command, seed, versions, times
      checkpoint.safetensors    the model's parameters
      log.jsonl, log.csv        one JSON object, or line, per epoch
      checkpoints/              the state of an unfinished run, for `--resume`; removed when it is complete
      run.lock                  held by the process that trains; a second run in the folder is refused
      failure.json              the step at which a run stopped because a number was not finite
      tensorboard/              the log as TensorBoard events, if requested
      predictions.safetensors   per split: sampled probabilities, labels, optional inputs, attention, edges and doubt
      metrics.json              what `bayesattn evaluate` measured
      report.html               what `bayesattn report` wrote

Every file is written under a temporary name and renamed, so a reader finds the old file or the new one, never half of one.
docs/recipes/run-folders.md describes the fields.
"""

from bayesattn.evaluation.runs.folder import (
    METRICS_FILE,
    METRICS_SCHEMA,
    PACKAGES,
    REPORT_FILE,
    RUN_FILE,
    RUN_SCHEMA,
    command_line,
    environment,
    now,
    read_run,
    write_run,
)
from bayesattn.evaluation.runs.predictions import (
    PREDICTIONS_FILE,
    PREDICTIONS_SCHEMA,
    DoubtfulExamples,
    EdgeWeights,
    Predictions,
    SplitPredictions,
    read_predictions,
    write_predictions,
)

__all__ = [
    "METRICS_FILE",
    "METRICS_SCHEMA",
    "PACKAGES",
    "PREDICTIONS_FILE",
    "PREDICTIONS_SCHEMA",
    "REPORT_FILE",
    "RUN_FILE",
    "RUN_SCHEMA",
    "DoubtfulExamples",
    "EdgeWeights",
    "Predictions",
    "SplitPredictions",
    "command_line",
    "environment",
    "now",
    "read_predictions",
    "read_run",
    "write_predictions",
    "write_run",
]
