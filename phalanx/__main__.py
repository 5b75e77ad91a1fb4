"""`python -m phalanx`: the command line."""

from phalanx.cli.main import entry

if __name__ == "__main__":
    entry()
