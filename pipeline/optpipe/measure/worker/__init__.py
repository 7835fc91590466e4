"""The only code that runs inside a measured process: loads one artifact, answers queries, records times.

`python -m optpipe.measure.worker` reads records as JSON, one per line of standard input: how to start, which session to
load, then points to measure. It answers with events, one JSON object per line of standard output. Samples go to a
shared memory file.
"""
