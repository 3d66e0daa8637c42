"""The tests of devices, and asking for them."""
