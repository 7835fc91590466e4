"""Values in, text out: terminal, Markdown, HTML."""
