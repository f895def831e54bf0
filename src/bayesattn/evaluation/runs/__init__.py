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

from bayesattn.evaluation.runs.doubtful import DoubtfulExamples
from bayesattn.evaluation.runs.folder import (
    CHECKPOINT_FILE,
    CHECKPOINTS_FOLDER,
    FAILURE_FILE,
    LOG_FILE,
    LOG_TABLE_FILE,
    METRICS_FILE,
    METRICS_SCHEMA,
    PACKAGES,
    REPORT_FILE,
    RUN_FILE,
    RUN_SCHEMA,
    TENSORBOARD_FOLDER,
    check_run_folder,
    command_line,
    environment,
    make_run_folder,
    now,
    read_run,
    write_log,
    write_run,
)
from bayesattn.evaluation.runs.lock import LOCK_FILE, hold_run_folder
from bayesattn.evaluation.runs.predictions import (
    PREDICTIONS_FILE,
    PREDICTIONS_SCHEMA,
    EdgeWeights,
    Predictions,
    SplitPredictions,
    read_predictions,
    write_predictions,
)
from bayesattn.files import (
    JSON_LIMIT,
    RunError,
    check_file,
    read_json,
    read_tensors,
    read_text,
    remove_leftovers,
    replacing,
    write_bytes,
    write_csv,
    write_json,
    write_tensors,
)

__all__ = [
    "CHECKPOINTS_FOLDER",
    "CHECKPOINT_FILE",
    "FAILURE_FILE",
    "JSON_LIMIT",
    "LOCK_FILE",
    "LOG_FILE",
    "LOG_TABLE_FILE",
    "METRICS_FILE",
    "METRICS_SCHEMA",
    "PACKAGES",
    "PREDICTIONS_FILE",
    "PREDICTIONS_SCHEMA",
    "REPORT_FILE",
    "RUN_FILE",
    "RUN_SCHEMA",
    "TENSORBOARD_FOLDER",
    "DoubtfulExamples",
    "EdgeWeights",
    "Predictions",
    "RunError",
    "SplitPredictions",
    "check_file",
    "check_run_folder",
    "command_line",
    "environment",
    "hold_run_folder",
    "make_run_folder",
    "now",
    "read_json",
    "read_predictions",
    "read_run",
    "read_tensors",
    "read_text",
    "remove_leftovers",
    "replacing",
    "write_bytes",
    "write_csv",
    "write_json",
    "write_log",
    "write_predictions",
    "write_run",
    "write_tensors",
]
