"""Shared by all recipes: configs, the training loop, checkpoints, tables."""
