"""The one door to the compiler of kernels and to what torch does not document."""
