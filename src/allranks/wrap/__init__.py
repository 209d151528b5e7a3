"""Replication of modules: models, precision, batch norm over ranks, moving averages."""

from allranks.wrap.ema import Ema as Ema
from allranks.wrap.model import Model as Model
from allranks.wrap.model import Window as Window
from allranks.wrap.model import plain as plain
from allranks.wrap.precision import Precision as Precision
