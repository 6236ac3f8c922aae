"""One process: names that are replaced in frameworks, restarts, and the last words of an error."""
