"""Fuzz targets: whatever bytes a reader gets, it gives a result or a TpplanError."""
