"""`optpipe preprocess` and `bench --from-images`: the DALI pipeline derived from the model's transform, proven equal, and measured."""
