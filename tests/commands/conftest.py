"""The datasets of these tests."""

from support.dataset_fixtures import flat_dataset, json_lines, tokenizer_path, write_dataset

__all__ = ["flat_dataset", "json_lines", "tokenizer_path", "write_dataset"]
