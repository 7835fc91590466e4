"""One file per command: options in, one `Outcome` out. A command neither formats figures nor prints."""
