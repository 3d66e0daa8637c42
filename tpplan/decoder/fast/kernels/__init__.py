"""The kernels of the decoder, written in Python for numba to compile, and what they are made of."""
