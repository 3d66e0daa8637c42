"""The tests of programs on CUDA devices: most of them need none."""
