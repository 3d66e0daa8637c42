"""The executor: compiles a plan into device contexts and moves tensors between them. Everything here needs torch."""
