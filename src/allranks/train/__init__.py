"""The loop's parts put together: start() and the run it gives."""

from allranks.train.run import Run as Run
from allranks.train.slots import Update as Update
from allranks.train.start import start as start
