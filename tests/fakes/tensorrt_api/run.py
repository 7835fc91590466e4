"""`optpipe` whose backend `tensorrt` builds without a GPU, as the library behind the bindings here does."""

from optpipe.backends.tensorrt import TENSORRT
from optpipe.cli.app import app

if __name__ == "__main__":
    object.__setattr__(TENSORRT, "ahead_of_time", True)
    app()
