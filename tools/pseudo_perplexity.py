"""`megahead pseudo-perplexity` in a checkout, see megahead/commands/pseudo_perplexity.py."""

from megahead.commands.pseudo_perplexity import main
from megahead.errors import run_command

if __name__ == "__main__":
    run_command(main)
