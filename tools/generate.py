"""`megahead generate` in a checkout, see megahead/commands/generate.py."""

from megahead.commands.generate import main
from megahead.errors import run_command

if __name__ == "__main__":
    run_command(main)
