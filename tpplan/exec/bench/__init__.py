"""What ``tpplan bench`` does: times of operations, beside others who do the same."""
