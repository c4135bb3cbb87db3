"""Exports to Hugging Face folders and imports from them; no other package uses Hugging Face's names."""
