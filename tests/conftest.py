"""Settings of the whole suite."""

import os
import sys

from hypothesis import settings

# wall-clock limits per example would make laws fail on a busy machine
settings.register_profile("fast", deadline=None, max_examples=20, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=100)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

# Some hundred processes start here, many with torch. Container images like to forbid cached bytecode, and then each of
# them compiles torch's thousand modules anew: more than the tests' own work.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
