"""Tools on the command line: ``python -m sparkkeras doctor``."""

from sparkkeras.diagnostics.doctor import run

if __name__ == "__main__":
    run()
