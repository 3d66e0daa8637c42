"""The tests of ``tpplan selftest``."""
