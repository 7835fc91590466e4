"""What a model's outputs mean: a task per file, and one entry in `registry`.

A task says how outputs become predictions, how predictions are scored and how sure a score is, what parity of two models'
predictions is, and what data it reads. Predictions and truths are plain values that Parquet holds, so that `verify` scores them again.
"""
