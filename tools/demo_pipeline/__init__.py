"""The parts of `tools/demo.py`: a real corpus from this machine, a cloze test from it, stages that resume."""
