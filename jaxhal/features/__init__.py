"""What number does the paper compute?  Each written for one head or one sample."""
