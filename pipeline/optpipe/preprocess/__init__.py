"""`optpipe preprocess`: the DALI pipeline derived from the model's transform, proven equal, and measured."""
