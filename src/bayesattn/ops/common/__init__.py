"""What the kernels of attention, segments and priors share: launching, precision, random draws, tiles."""
