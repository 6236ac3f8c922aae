"""Requirements of models, arguments and adapters, checked before training."""
