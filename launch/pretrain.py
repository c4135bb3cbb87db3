"""The script that launchers start on each rank: `megahead pretrain`, see megahead/commands/pretrain.py."""

from megahead.commands.pretrain import main

if __name__ == "__main__":
    main()
