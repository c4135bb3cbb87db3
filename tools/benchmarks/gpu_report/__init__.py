"""What tools/gpu_report.py is made of: parts of the measurement, each a command of its own, and what comes of them."""
