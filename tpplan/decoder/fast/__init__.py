"""Fused kernels for what :mod:`tpplan.decoder.layer` computes; without this package everything runs, but slower."""
