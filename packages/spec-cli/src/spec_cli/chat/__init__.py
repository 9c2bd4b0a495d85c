"""The parts of `spec chat`."""
