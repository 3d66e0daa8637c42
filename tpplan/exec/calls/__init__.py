"""From arguments to programs: slices of axes, operands and their checks, cached calls, and calls that repeat."""
