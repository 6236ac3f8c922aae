"""Tables of one batch: what every rank computes, what it sends and receives, round by round. No torch."""
