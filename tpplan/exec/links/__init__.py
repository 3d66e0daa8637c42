"""What is known of the links between the GPUs of this machine, and the thresholds that were measured on them."""
