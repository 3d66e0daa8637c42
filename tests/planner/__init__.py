"""The tests of planning."""
