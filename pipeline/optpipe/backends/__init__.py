"""One runtime per file behind one contract, `base.Backend`.

A new runtime is a subclass and an entry point of the group `optpipe.backends`, in this distribution
or in another. It checks what can be built and run here, builds and loads, reads the details that it
recorded, and defines how servers run its artifacts, how `profile` finds the times of its layers, and
which other tool builds the same. No other room depends on a backend's name.
"""
