"""Noise: what a draw is (`specification`), whose it is (`keyed`), and how it stays with a growing sequence (`streams`)."""

from bayesattn.noise.keyed import derive_seeds, example_seeds, is_keyed, keyed_noise, next_seeds
from bayesattn.noise.specification import (
    PHILOX_ROUNDS,
    Seed,
    as_seed,
    counter_halves,
    draw_seed,
    dropout_factor,
    dropout_numbers,
    exponential,
    generator_halves,
    log_noise,
    normal,
    philox,
    to_exponential,
    to_normal,
    to_uniform,
)

__all__ = [
    "PHILOX_ROUNDS",
    "Seed",
    "as_seed",
    "counter_halves",
    "derive_seeds",
    "draw_seed",
    "dropout_factor",
    "dropout_numbers",
    "example_seeds",
    "exponential",
    "generator_halves",
    "is_keyed",
    "keyed_noise",
    "log_noise",
    "next_seeds",
    "normal",
    "philox",
    "to_exponential",
    "to_normal",
    "to_uniform",
]
