"""What ran when: kernels, API calls and ranges of one recording as intervals, and the time between them. No advice, no files."""
