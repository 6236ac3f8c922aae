"""The Hugging Face Trainer on shards."""
