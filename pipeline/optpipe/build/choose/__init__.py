"""`optpipe build --precision auto`: builds every candidate, keeps those within an accuracy budget, and races them."""
