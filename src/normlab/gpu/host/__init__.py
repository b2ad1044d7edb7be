"""What launches kernels without Python: a C++ extension, built on first use."""
