"""Code that all Triton kernels share: random draws, tiles, launches and recorded launches."""
