"""How ranges are computed from data: one algorithm per file, collect first, then compute."""
