"""Which stored artifacts a MODEL argument means, what is known of them, and listing and removing them. Builds nothing."""
