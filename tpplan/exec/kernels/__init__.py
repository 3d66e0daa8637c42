"""The kernels of the executor, written in Python for numba to compile, and what kernels of others are made of, too."""
