"""From a model, devices and a request to a plan: what each cut costs, and which cut is the best."""
