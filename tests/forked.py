"""Commands and notebooks in processes forked off what has imported all they need."""

import importlib
import os
import sys

from jaxhal.__main__ import main

for name in (
    "jaxhal.cli.app",
    "jaxhal.experiments.guiding",
    "jaxhal.serve.app",
    "jaxhal.serve.proxy",
    "ipykernel.kernelapp",
    "matplotlib.pyplot",
    "orbax.checkpoint",
    "pandas",
    "pyarrow.parquet",
    "scipy.stats",
    "sklearn.ensemble",
    "sklearn.feature_extraction.text",
    "sklearn.linear_model",
    "sklearn.model_selection",
    "starlette.applications",
    "tokenizers",
    "transformers.models.auto.tokenization_auto",
    "uvicorn",
):
    importlib.import_module(name)


def command(arguments, folder, errors, line):
    """Runs it in a folder; what it says on standard error goes to a file."""
    os.chdir(folder)
    for name, number in ((os.devnull, 1), (errors, 2)):
        os.dup2(os.open(name, os.O_WRONLY), number)
    sys.argv[1:] = arguments
    main()


def kernel(connection, line):
    """Runs what a notebook sends, which has to import what it uses of jaxhal itself."""
    from ipykernel.kernelapp import IPKernelApp

    os.environ["MPLBACKEND"] = "agg"
    for module in [name for name in sys.modules if name.split(".")[0] == "jaxhal"]:
        del sys.modules[module]
    IPKernelApp.launch_instance(argv=["-f", connection])
