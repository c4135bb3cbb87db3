from megahead.__main__ import script

script(__name__, "start")
