"""`optpipe bench`: which loads are put on which artifacts, in what order, and the run that records it. One load is measuring's."""
