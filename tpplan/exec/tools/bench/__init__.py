"""Benchmarks of tpplan's operations against other implementations, for ``tpplan bench``."""
