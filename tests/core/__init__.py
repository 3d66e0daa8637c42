"""The tests of what a plan is made of."""
