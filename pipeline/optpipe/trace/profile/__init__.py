"""`optpipe profile`: stages recorded, each in a process of its own, judged, shown, and recomputed."""
