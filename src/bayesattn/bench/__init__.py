"""Benchmarks: ratios against what a user would pick instead, measured in one run, written as CSV."""
