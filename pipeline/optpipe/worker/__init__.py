"""The only code that runs inside a measured process: load one artifact, answer queries, write down when.

`python -m optpipe.worker SESSION.json` loads, then takes one point (batch size, scenario, mode) per line of standard input
and answers with events, one JSON object per line of standard output. Samples go to a shared memory file as they come.
"""
