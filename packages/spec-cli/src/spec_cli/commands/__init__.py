"""The commands. Each imports what is heavy only when it runs."""
