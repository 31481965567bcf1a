"""How is a probe trained?  Pure functions on pytrees; a higher logit, more likely 1.

Label 1 is hallucinated, 0 grounded.  A row's ``weight`` says how much it counts and 0
leaves it out, so folds and validation parts are weights and never change a shape.
"""
