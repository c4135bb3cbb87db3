"""`megahead inspect-dataset` in a checkout, see megahead/commands/inspect_dataset.py."""

from megahead.commands.inspect_dataset import main
from megahead.errors import run_command

if __name__ == "__main__":
    run_command(main)
