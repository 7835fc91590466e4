"""Making and reading a recording: run nsys, import and redact what it wrote, read it (or a torch trace) into frames. No figures."""
