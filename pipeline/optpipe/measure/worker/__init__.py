"""The only code that runs inside a measured process: load one artifact, answer queries, write down when.

`python -m optpipe.measure.worker` takes records as JSON, one per line of standard input: how to start, which session to load, then
points to measure (batch size, scenario, mode). It answers with events, one JSON object per line of standard output. Samples
go to a shared memory file as they come.
"""
