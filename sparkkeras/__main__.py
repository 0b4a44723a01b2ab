"""Tools on the command line: ``python -m sparkkeras doctor``."""

from sparkkeras.diagnostics.command_line import run

if __name__ == "__main__":
    run()
