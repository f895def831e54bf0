"""Shared by the kernels of attention, segments and priors: launching, precision, random draws, tiles."""
