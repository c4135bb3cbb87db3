"""Headless training under other trainers than ours; a file for each."""
