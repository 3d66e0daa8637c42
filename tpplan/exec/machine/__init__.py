"""What this machine is: devices, links, their probes and measured thresholds, and the transports that they allow."""
