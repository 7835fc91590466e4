"""optpipe: from a trained model to a signed-off, deployable inference engine."""

__version__ = "0.1.0"
