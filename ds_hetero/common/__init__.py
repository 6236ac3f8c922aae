"""What every part of ds_hetero uses: array types, units, text for people, reading of files, what is installed."""
