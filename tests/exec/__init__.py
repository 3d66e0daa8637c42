"""The tests of compiled plans: contexts and their operations."""
