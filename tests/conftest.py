"""Settings of the whole suite."""

from hypothesis import settings

# wall-clock limits per example would make laws fail on a busy machine
settings.register_profile("optpipe", deadline=None)
settings.load_profile("optpipe")
