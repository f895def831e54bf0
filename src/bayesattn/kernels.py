"""For Triton kernels outside the library: whether they can run, and cheap launches."""

from bayesattn.ops.attention.support import HAS_TRITON, INTERPRETED
from bayesattn.ops.common.launch import prepared

__all__ = ["HAS_TRITON", "INTERPRETED", "prepared"]
