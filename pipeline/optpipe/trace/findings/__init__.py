"""What a profile says: trace quality, bottleneck, gaps, rules with advice, the difference of two profiles. Reads no files."""
