"""Constants and tables on which the host and the kernels agree. Imports nothing that needs torch or numba."""
