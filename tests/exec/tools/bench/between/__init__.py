"""The tests of ``tpplan bench --processes``."""
