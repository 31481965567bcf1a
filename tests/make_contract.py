"""Writes down the server's contract: python tests/make_contract.py"""

import json
from pathlib import Path

from jaxhal.serve.app import Server

if __name__ == "__main__":
    contract = json.dumps(Server({}).app().openapi(), indent=1)
    (Path(__file__).parent / "golden" / "openapi.json").write_text(f"{contract}\n")
