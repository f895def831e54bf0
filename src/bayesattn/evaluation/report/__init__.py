"""From predictions to numbers in a file and one page to look at."""

from bayesattn.evaluation.measure import measure_run
from bayesattn.evaluation.report.page import write_report

__all__ = ["measure_run", "write_report"]
