"""DALI in place of CPU preprocessing: derived from the model's transform, proven equal, measured fairly."""
