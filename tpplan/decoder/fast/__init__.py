"""Fused kernels for what :mod:`tpplan.decoder.layer` computes. Without this package, everything runs, slower."""
