"""What runs programs: the engine, which lowers and caches them, and virtual devices in host memory."""
