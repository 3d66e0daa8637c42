"""What ``tpplan selftest`` does: trials of every operation, and what is found."""
