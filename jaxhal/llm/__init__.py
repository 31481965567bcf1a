"""Asking models in words: endpoints, who may be asked, entailment, judges."""
