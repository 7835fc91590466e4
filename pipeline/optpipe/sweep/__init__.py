"""`optpipe sweep` and `optpipe store merge`: a matrix of jobs, placed on the GPUs of one host or many, whose figures stay true.

A cell defines one request (recipe, load, limits, kind of GPU); a cell in one environment is a job, and its key is the hash of both.
A job runs the existing build and bench in a separate process group. Its record lies under `jobs/KEY/` of the workspace, named by
the hash of its content, so that workspaces merge by union and nothing is overwritten.
"""
