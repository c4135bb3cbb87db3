"""`megahead inspect-checkpoint` in a checkout, see megahead/commands/inspect_checkpoint.py."""

from megahead.commands.inspect_checkpoint import main
from megahead.errors import run_command

if __name__ == "__main__":
    run_command(main)
