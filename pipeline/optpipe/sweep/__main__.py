"""`python -m optpipe.sweep`: see `optpipe.sweep.task`."""

from optpipe.sweep.task import main

if __name__ == "__main__":
    main()
