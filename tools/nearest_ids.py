"""`megahead nearest-ids` in a checkout, see megahead/commands/nearest_ids.py."""

from megahead.commands.nearest_ids import main
from megahead.errors import run_command

if __name__ == "__main__":
    run_command(main)
