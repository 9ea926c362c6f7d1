"""A soak of a running server: right answers under attacks, and nothing left behind."""
