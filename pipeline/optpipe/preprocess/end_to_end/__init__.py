"""From encoded files to predictions in one process: DALI and engine overlapped, and how that compares with each alone."""
