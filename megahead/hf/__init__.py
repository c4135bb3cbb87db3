"""Hugging Face folders out and in; nothing else knows Hugging Face's names."""
