"""Tests of :mod:`tpplan.models.gguf`."""
