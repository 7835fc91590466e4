"""Tasks: one file for each, and one entry in `registry`.

A task decodes outputs into predictions, scores them with intervals, compares two models' predictions, and reads its data.
Predictions and truths are plain values that Parquet can hold, so that `verify` can score them again.
"""
