"""The settings of a run: a frozen, documented schema, read from YAML and `--set` overrides. Imports no torch."""
