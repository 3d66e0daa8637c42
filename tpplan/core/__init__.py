"""What a plan is made of: axes, sizes, the model's shapes, devices, workspace, limits, and the plan itself."""
