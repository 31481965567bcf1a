"""How a checkpoint becomes a pure function."""

import os

# Without PyTorch transformers begins with what it cannot do, none of which is needed.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
