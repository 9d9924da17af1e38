"""`python -m pyinertia`: the command line."""

from pyinertia.cli import app

if __name__ == "__main__":
    app(prog_name="pyinertia")
