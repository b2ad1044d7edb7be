"""The passes in torch operators: on the CPU, and on every device that has no kernels."""
