"""`python -m optpipe` and the `optpipe` command."""

from optpipe.cli import app


def main() -> None:
    """Runs the command line."""
    app()


if __name__ == "__main__":
    main()
