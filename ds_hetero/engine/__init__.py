"""Engine of our own, of no framework: the handle, the registry, registration, loaders, losses and sharded calls."""
