"""`megahead preprocess` in a checkout, see megahead/commands/preprocess.py."""

from megahead.commands.preprocess import main
from megahead.errors import run_command

if __name__ == "__main__":
    run_command(main)
