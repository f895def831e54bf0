"""What every recipe shares: configs, the training loop, checkpoints, tables."""
