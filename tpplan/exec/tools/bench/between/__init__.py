"""Timing operations between processes with a device each, beside NCCL and torch's symmetric memory."""
