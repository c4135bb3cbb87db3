"""`megahead synonyms` in a checkout, see megahead/commands/synonyms.py."""

from megahead.commands.synonyms import main
from megahead.errors import run_command

if __name__ == "__main__":
    run_command(main)
