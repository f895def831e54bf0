"""Dense stochastic attention."""
