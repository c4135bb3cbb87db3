"""`megahead estimate` in a checkout, see megahead/commands/estimate.py."""

from megahead.commands.estimate import main
from megahead.errors import run_command

if __name__ == "__main__":
    run_command(main)
