"""Shows runs: curves (PNG), tables, and one HTML page."""
