"""The tests of what compiles kernels."""
