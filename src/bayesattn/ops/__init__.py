"""Operators: one folder each, with the plain-torch reference beside its faster backends."""
