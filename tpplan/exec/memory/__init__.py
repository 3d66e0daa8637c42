"""The memory of a context: a device's buffers and scratch, host buffers, and how programs find them."""
