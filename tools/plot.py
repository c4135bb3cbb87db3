"""`megahead plot` in a checkout, see megahead/commands/plot.py."""

from megahead.commands.plot import main
from megahead.errors import run_command

if __name__ == "__main__":
    run_command(main)
