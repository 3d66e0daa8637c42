"""The layers of a model, computed by plain torch: a stack over all devices, the steps on one, and their arithmetic."""
