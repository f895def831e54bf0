"""Where kernels are tested: on a GPU or in Triton's interpreter; a test file that asks elsewhere is skipped."""

import pytest
import torch

pytest.importorskip("triton")

from bayesattn.ops.attention.support import INTERPRETED

HAS_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if HAS_GPU else "cpu"
# the interpreter computes bfloat16 wrongly
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if HAS_GPU else [])
MARKS = [pytest.mark.kernel] + ([pytest.mark.gpu] if HAS_GPU else [])
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")

if not HAS_GPU and not INTERPRETED:
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
