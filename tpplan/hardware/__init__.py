"""The devices that a plan is for: the list that users write, the catalogue of GPUs, devices files, and probing."""
