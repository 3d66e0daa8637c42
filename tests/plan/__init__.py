"""The tests of the plan half: from models, devices and requests to plans, and their files."""
