"""The passes and whole normalizers in Triton. The first CUDA tensor loads :mod:`normlab.gpu.backend`."""
