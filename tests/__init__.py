"""The tests of tpplan."""
