"""The drivers of `tools/paper.py`, one an experiment: runs of the normal commands, and tables of what came out."""
