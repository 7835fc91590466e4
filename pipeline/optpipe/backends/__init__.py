"""One runtime per file behind one contract, `base.Backend`.

A new runtime is a subclass and an entry of `registry.BACKENDS`. It says what can be built and run here, builds and loads, reads the
details that it recorded, and says how servers run its artifacts, how `profile` finds the times of its layers, and which other
tool builds the same. No other room asks for a backend's name.
"""
