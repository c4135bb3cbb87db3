"""`megahead merge-datasets` in a checkout, see megahead/commands/merge_datasets.py."""

from megahead.commands.merge_datasets import main
from megahead.errors import run_command

if __name__ == "__main__":
    run_command(main)
