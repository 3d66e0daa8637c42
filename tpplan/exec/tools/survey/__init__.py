"""Measures which way of exchanging data is the fastest up to which size."""
