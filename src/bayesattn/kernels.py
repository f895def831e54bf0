"""What Triton kernels outside the library share with its own: whether they can run, and launches that cost little."""

from bayesattn.ops.attention.support import HAS_TRITON, INTERPRETED
from bayesattn.ops.common.launch import prepared

__all__ = ["HAS_TRITON", "INTERPRETED", "prepared"]
