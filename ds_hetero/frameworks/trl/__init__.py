"""TRL: the names of its trainers and outputs that ds_hetero knows."""
