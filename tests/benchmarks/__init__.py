"""The tests of what measures and wears out tpplan, in benchmarks/."""
