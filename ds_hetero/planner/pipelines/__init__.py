"""Plans of pipelines with unequal stages over unequal devices: made, compared, explained, re-planned. No torch."""
