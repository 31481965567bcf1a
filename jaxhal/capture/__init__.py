"""One pass of the model, and what reducers make of its rows before they die."""

from jaxhal.capture.forward import read as read
from jaxhal.capture.forward import read_rows as read_rows
