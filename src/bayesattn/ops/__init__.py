"""The operators: `attention`, `segment` (attention on edges) and `prior`, and in `common` what their kernels share."""
