"""The running half: it executes a schedule and does not ask how it was found."""
