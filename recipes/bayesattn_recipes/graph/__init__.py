"""Node classification with graph attention: the paper's first table, and what it does not show."""
