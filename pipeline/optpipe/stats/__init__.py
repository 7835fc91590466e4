"""Pure statistics: summaries, intervals, significance. No clock, no files."""
