"""The tests of the executor's kernels."""
