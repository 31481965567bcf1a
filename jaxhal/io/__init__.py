"""Files, checksums, and text as it is shown: what everything else stands on."""
