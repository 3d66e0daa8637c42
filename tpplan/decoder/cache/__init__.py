"""The KV cache of a device: its storage, ring buffers of sliding windows, and which query heads read which KV heads."""
