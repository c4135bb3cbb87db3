"""The settings of a run: a frozen pydantic schema, read from YAML and `--set` overrides. Imports no torch."""
