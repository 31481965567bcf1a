"""What is computed of an answer, once: capture, features, samples, the cache."""
