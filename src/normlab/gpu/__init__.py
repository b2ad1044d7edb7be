"""The passes and whole normalizers in Triton. :mod:`normlab.gpu.backend` is imported for the first CUDA tensor."""
