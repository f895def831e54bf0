"""From a trained model to numbers one can act on: run folders, predictions, measures, statistics, the report page."""
