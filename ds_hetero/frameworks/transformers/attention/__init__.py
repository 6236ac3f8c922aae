"""Our attention and masks, registered with transformers."""
