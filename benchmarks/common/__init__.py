"""What several benchmarks share: rows of tables, and child processes."""
