"""One training step as a picture: who computed, what was on its way, and for what the host stood still."""
