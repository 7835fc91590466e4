"""Values, records, errors and parsers that all other rooms use. Imports nothing heavy."""
