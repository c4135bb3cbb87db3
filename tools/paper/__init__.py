"""The experiments behind the tables of docs/: drivers over the normal commands."""
