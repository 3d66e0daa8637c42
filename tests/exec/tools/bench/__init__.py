"""The tests of ``tpplan bench``."""
