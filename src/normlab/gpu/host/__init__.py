"""A C++ extension that launches kernels without Python. It is built on first use."""
