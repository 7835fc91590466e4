"""`optpipe profile`: stages run under nsys, each in a process of its own, and the run's recomputation. Reading a trace is trace's."""
