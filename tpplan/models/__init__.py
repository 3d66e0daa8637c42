"""From a checkpoint's config and headers to the model's shapes: families of architectures, formats of weights."""
