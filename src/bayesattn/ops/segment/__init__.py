"""Softmax over the entries of ragged rows: attention on the edges of a graph."""
