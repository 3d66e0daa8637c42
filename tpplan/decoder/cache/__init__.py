"""The KV cache of a device, who reads it, and the attention of passes over it."""
