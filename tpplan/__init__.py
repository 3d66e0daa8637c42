"""Plan how a large language model is split over several GPUs, save the plan, and run by it."""

__version__ = "0.1.0"
