"""The tests of the decoder's kernels and their launches."""
