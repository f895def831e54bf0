"""Handwritten digits, 8 × 8 pixels, few labels: the demo, and the smallest complete recipe."""
