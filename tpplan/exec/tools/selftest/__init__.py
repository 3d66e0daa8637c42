"""The self-test of ``tpplan selftest``: trials of all operations, and their results."""
