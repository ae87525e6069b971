"""Tests on PyTorch's CUDA build without a GPU (docs/design/null_cuda.md)."""
