"""What the commands take; what they do is in `ds_hetero.cli`, imported when a command is run."""
