"""What several benchmarks share: rows of tables, child processes, and checkpoints of random weights."""
