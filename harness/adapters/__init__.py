"""One small file for each implementation. Only these may import what they adapt."""
